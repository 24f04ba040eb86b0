"""The training loop, its step, input and evaluation; recipes, optimizers, faults and saving have their own folders."""
