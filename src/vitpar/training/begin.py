"""Initial weights from a folder: the recipe's `model.weights`, instead of random initial values.

Parameters are those of the folder, under any plan. For fine-tuning, the classifier keeps its initial values if the data
have another number of classes, and learned positions are interpolated if images have another size.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from vitpar.errors import RecipeError
from vitpar.models.config import ModelConfig
from vitpar.models.initial import copy_whole_
from vitpar.parallel import ParallelModel
from vitpar.training.optim.optimizer import EMA
from vitpar.training.recipe import Recipe
from vitpar.training.recipe.file import read_data_section
from vitpar.weights.folder import RECIPE, load_weights, open_weights
from vitpar.weights.importing import CLASSIFIERS, POSITIONS, grid_of, resampled, resized

_OF_THE_RUN = ("name", "num_classes", "image_size", "drop_path", "dropout", "layer_scale", "init")
"""Model settings in which a run may differ from its initial weights: they change no parameter, or are adapted."""


def beginning(recipe: Recipe, config: ModelConfig) -> list[str]:
    """Return, as sentences, how the run differs from the recipe's initial weights.

    config: configuration of the run.

    Raises DataError for weights that cannot be read, and RecipeError for those of another model.
    """
    assert recipe.model.weights is not None
    folder = Path(recipe.model.weights)
    there = open_weights(folder).config
    if type(there) is not type(config):
        raise RecipeError(
            f"the weights in '{folder}' are of the family {there.FAMILY}, but {config.name} is of {config.FAMILY}: "
            f"use their model, as with --recipe {folder / RECIPE}"
        )
    other = [
        f"{field.name} is {getattr(config, field.name)} but {getattr(there, field.name)} in the weights"
        for field in fields(config)  # type: ignore[arg-type]
        if field.name not in _OF_THE_RUN and getattr(config, field.name) != getattr(there, field.name)
    ]
    scales = [getattr(one, "layer_scale", None) for one in (config, there)]
    if (scales[0] is None) != (scales[1] is None):
        words = [scale or "not set" for scale in scales]
        other.append(f"layer_scale is {words[0]} but {words[1]} in the weights")
    if other:
        raise RecipeError(
            f"the weights in '{folder}' do not match the model: {'; '.join(other)}: use their model, as with --recipe "
            f"{folder / RECIPE}"
        )
    notes = []
    if config.num_classes != there.num_classes:
        notes.append(
            f"the classifier of {config.num_classes:,} classes is newly initialised "
            f"(the weights have {there.num_classes:,})"
        )
    if config.image_size != there.image_size:
        notes.append(resized(there, config))
    known = read_data_section(folder / RECIPE)
    for name in ("mean", "std"):
        if (mine := getattr(recipe.data, name)) != (theirs := getattr(known, name)):
            notes.append(f"images are normalised with {name} {mine}, but with {theirs} for the weights")
    return notes


@torch.no_grad()
def begin(model: ParallelModel, recipe: Recipe, ema: EMA | None = None) -> str:
    """Fill `model` and its averages from the recipe's weights, and return a message for the user. Collective.

    model: has its initial values, which parameters without weights keep.

    Raises what `beginning` does, and CheckpointError for a checkpoint that is damaged.
    """
    notes, config = beginning(recipe, model.config), model.config
    assert recipe.model.weights is not None
    folder = Path(recipe.model.weights)
    weights = open_weights(folder)
    without = set(CLASSIFIERS) if config.num_classes != weights.config.num_classes else set[str]()
    resizes = config.image_size != weights.config.image_size
    if resizes:
        without.add(POSITIONS)
    load_weights(model, folder, without)
    for name, parameter in model.named_parameters():
        if name == POSITIONS and resizes:
            copy_whole_(parameter, resampled(weights.read(POSITIONS), *grid_of(config, parameter.shape)))
    model.parameters_changed()
    if ema:
        ema.restart()
    return "; ".join((f"parameters are loaded from {folder}", *notes))
