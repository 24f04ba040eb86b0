"""What a rank keeps for every element of its parameters, besides activations."""

from vitpar.parallel import PRECISIONS
from vitpar.train.recipe import Recipe


def state_bytes(recipe: Recipe) -> int:
    """Bytes for each element: the parameter, its gradient, the optimizer's moments and the running average, where there are such."""
    moments = {"adamw": 2, "sgd": 1 if recipe.optimizer.momentum else 0}[recipe.optimizer.name]
    copies = 2 + moments + bool(recipe.train.ema_decay)
    return copies * PRECISIONS[recipe.train.precision].parameters.itemsize
