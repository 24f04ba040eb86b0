"""Memory of parameters, gradients and optimizer state, computed from a recipe without torch."""

import math

from vitpar.models.config import ModelConfig
from vitpar.recipe import Recipe
from vitpar.strategy.precisions import PRECISION_TYPES, DataType

_BOUNDS = {"muon": " (at most)", "adafactor": " (about)"}
"""Words about the size of the state, by optimizer."""


def state_bytes(recipe: Recipe, config: ModelConfig) -> float:
    """Return the bytes kept for each element of a rank's trained parameters: the tensors that `state_words` names."""
    return (2 + moments(recipe, config)) * _stored(recipe).itemsize


def frozen_bytes(recipe: Recipe) -> int:
    """Return the bytes kept for each element of a rank's frozen parameters."""
    return _stored(recipe).itemsize


def moments(recipe: Recipe, config: ModelConfig) -> float:
    """Return the numbers kept per trained element besides parameter and gradient.

    They are the optimizer state and the running average. Muon keeps 1 for elements of matrices of blocks and 2 for
    others: 2 is the maximum. Adafactor keeps a number for each row and column; this is the mean of the global model,
    without the copies that ranks keep of what their shards have in common.
    """
    average = bool(recipe.train.ema_decay)
    if recipe.optimizer.name != "adafactor":
        return _numbers(recipe) + average
    frozen, kept, elements = recipe.frozen(config), 0, 0
    for name, layer in config.layers.items():
        for one, shape in layer.parameters.items():
            if f"{name}.{one}" in frozen:
                continue
            size = math.prod(shape)
            kept += size if len(shape) < 2 else size // shape[-1] + size // shape[-2]
            elements += size
    return kept / max(elements, 1) + average


def state_words(recipe: Recipe) -> str:
    """Return the names of these tensors: `parameters, gradients, adamw state in float32`."""
    kinds = ["parameters", "gradients"]
    name = recipe.optimizer.name
    if name == "adafactor" or _numbers(recipe):
        kinds.append(f"{name} state{_BOUNDS.get(name, '')}")
    if recipe.train.ema_decay:
        kinds.append("running average")
    return f"{', '.join(kinds)} in {_stored(recipe).name}"


def _numbers(recipe: Recipe) -> int:
    """Return the numbers that an optimizer other than Adafactor keeps per element, at most."""
    momentum = 1 if recipe.optimizer.momentum else 0
    kept = {"adamw": 2, "adam": 2, "lion": 1, "lamb": 2, "muon": 2, "sgd": momentum, "lars": momentum}
    return kept[recipe.optimizer.name]


def _stored(recipe: Recipe) -> DataType:
    """Return the data type of parameters and optimizer state."""
    return PRECISION_TYPES[recipe.train.precision].parameters
