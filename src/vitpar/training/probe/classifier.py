"""Weights of a model with a classifier that was trained on its features."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitpar.checkpoint.index import CLASSES, CONFIG, RECIPE
from vitpar.errors import DataError
from vitpar.io import read_text
from vitpar.limits import MAX_TOML_BYTES
from vitpar.models import config_to_json
from vitpar.models.config import ModelConfig, field_names
from vitpar.training.inference import classifiers, feature_width
from vitpar.training.probe.linear import Probed
from vitpar.weights.folder import open_weights, write_weights

_SHARD_BYTES = 5 * 10**9


def write_classifier(
    folder: Path, about: Mapping[str, Any], probed: Probed, class_names: Sequence[str] | None
) -> list[Path]:
    """Write the weights that features come from, with the classifier of `probed`, to the new `folder`.

    about: what the file of features says (``vitpar.training.parquet_file``).

    Returns the files of tensors. Raises DataError for features of weights that are gone or do not fit, and
    CheckpointError if `folder` is not empty or cannot be written.
    """
    source = about.get("weights")
    if not isinstance(source, str):
        raise DataError("the file of training features does not name its weights: write it with `vitpar features`")
    there = open_weights(Path(source))
    names, (classes, width) = classifiers(there.config), probed.weight.shape
    if len(names) != 1 or "num_classes" not in field_names(type(there.config)):
        raise DataError(f"{there.config.name} has another classifier than one linear layer: leave --out out")
    if feature_width(there.config) != width:
        raise DataError(f"the weights in '{source}' have {feature_width(there.config)} features, not {width}")
    config: ModelConfig = replace(there.config, num_classes=classes)  # type: ignore[type-var]
    head = f"{config.last_layer.name}.{names[0]}"
    made = {f"{head}.weight": probed.weight, f"{head}.bias": probed.bias}
    shapes = config.shapes

    def read(name: str) -> Tensor:
        return made[name].contiguous() if name in made else there.read(name)

    others = {
        CONFIG: json.dumps(config_to_json(config), indent=1),
        RECIPE: read_text(Path(source) / RECIPE, MAX_TOML_BYTES),
        **({CLASSES: json.dumps(class_names)} if class_names else {}),
    }
    sizes = {name: 4 * torch.Size(shape).numel() for name, shape in shapes.items()}
    return write_weights(folder, sizes, read, others=others, shard_bytes=_SHARD_BYTES)
