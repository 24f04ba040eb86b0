"""Models without a plan or a process group, for training loops and tools that know PyTorch alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitpar.checkpoint import Checkpoint
from vitpar.checkpoint.index import INDEX
from vitpar.errors import ModelError
from vitpar.models import ModelConfig, model_config
from vitpar.models.initial import initialise
from vitpar.models.layers import PlainModel
from vitpar.training.begin import opened_for
from vitpar.training.hub_weights import local_weights
from vitpar.training.saving.resume import weights_folder
from vitpar.weights.folder import read_config
from vitpar.weights.importing import CLASSIFIERS, POSITIONS, grid_of, resampled


def create_model(
    name: ModelConfig | str | None = None,
    *,
    weights: Path | str | None = None,
    num_classes: int | None = None,
    seed: int = 0,
    **options: Any,
) -> PlainModel:
    """Return a model as a plain ``nn.Module``: float32, on the CPU, in training mode, from normalised images to logits.

    name: name or configuration of the model; None for that of the weights.
    weights: a run, saved weights, a checkpoint, or hf:OWNER/NAME; None for initial values.
    num_classes: outputs, by default as many as the weights have, or else 1,000. The classifier is newly initialised if
        the weights have another number, or were adapted to the model.
    seed: seed of initial values, as train.seed.
    options: further fields of the configuration, such as drop_path=0.1.

    Raises ModelError, DataError and CheckpointError, and RecipeError for weights of another model.
    """
    folder = None if weights is None else weights_folder(local_weights(Path(weights)))
    saved = None if folder is None else read_config(folder)
    if num_classes is not None:
        options["num_classes"] = num_classes
    if isinstance(name, str):
        config = model_config(name, **({"num_classes": saved.num_classes} if saved else {}) | options)
    elif (known := name or saved) is not None:
        config = replace(known, **options)  # type: ignore[type-var]
    else:
        raise ModelError("a model needs a name or weights: give one of the two")
    model = PlainModel(config)
    initialise(model, seed, config)
    model.tie()
    if folder is None:
        return model
    if (folder / INDEX).exists():
        Checkpoint.open_whole(folder)  # verifies the files
    opened = opened_for(folder, config)
    new = bool(opened.changes) or config.num_classes != opened.config.num_classes
    kept = {*opened.kept, *(CLASSIFIERS if new else ())}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key == POSITIONS and config.image_size != opened.config.image_size:
                parameter.copy_(resampled(opened.read(key), *grid_of(config, parameter.shape)))
            elif key not in kept:
                parameter.copy_(opened.read(key))
    return model
