"""Memory of parameters, gradients and optimizer state, computed from a recipe without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitpar.strategy.precisions import PRECISION_TYPES, DataType

if TYPE_CHECKING:
    from vitpar.models.config import ModelConfig
    from vitpar.training.recipe import Recipe


def state_bytes(recipe: Recipe) -> int:
    """Return the bytes kept for each element of a rank's trained parameters: the tensors that `state_words` names.

    Muon keeps less for some elements than for others: this is the maximum.
    """
    return (2 + moments(recipe)) * _stored(recipe).itemsize


def frozen_bytes(recipe: Recipe, config: ModelConfig) -> dict[str, int]:
    """Return the bytes kept for each element of the parameters of frozen layers, by the layer's name."""
    return dict.fromkeys(recipe.frozen(config), _stored(recipe).itemsize)


def moments(recipe: Recipe) -> int:
    """Return the number of parameter-sized tensors kept besides parameters and gradients.

    They are the optimizer state and the running average.
    """
    return _moments(recipe) + bool(recipe.train.ema_decay)


def state_words(recipe: Recipe) -> str:
    """Return the names of these tensors: `parameters, gradients, adamw state in float32`."""
    kinds = ["parameters", "gradients"]
    if _moments(recipe):
        kinds.append(f"{recipe.optimizer.name} state{' (at most)' if recipe.optimizer.name == 'muon' else ''}")
    if recipe.train.ema_decay:
        kinds.append("running average")
    return f"{', '.join(kinds)} in {_stored(recipe).name}"


def _moments(recipe: Recipe) -> int:
    """Return the numbers that the optimizer keeps per element, at most.

    Muon keeps 1 for matrices of blocks and 2 for others.
    """
    momentum = 1 if recipe.optimizer.momentum else 0
    kept = {"adamw": 2, "adam": 2, "lion": 1, "lamb": 2, "muon": 2, "sgd": momentum, "lars": momentum}
    return kept[recipe.optimizer.name]


def _stored(recipe: Recipe) -> DataType:
    """Return the data type of parameters and optimizer state."""
    return PRECISION_TYPES[recipe.train.precision].parameters
