"""Optimizers over sharded parameters, with norms, clipping, learning rates, averages and loss scales."""
