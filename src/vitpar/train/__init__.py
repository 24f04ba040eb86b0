"""Training: recipes, the loop, optimizers, evaluation, weights, and the proof that a plan does not change the
training."""
