"""Export of weights for timm and transformers: their names, and the configuration files next to the tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor

from vitpar.checkpoint.index import CONFIG
from vitpar.errors import DataError
from vitpar.models.description import MadeTensor
from vitpar.weights.folder import Weights, write_weights
from vitpar.weights.foreign import FAMILIES
from vitpar.weights.images import image_files, image_settings
from vitpar.weights.shards import listed

Format = Literal["timm", "transformers"]
CLASSIFIER = "classifier.safetensors"
"""File of a classifier that the library's model does not have."""


@dataclass(frozen=True)
class ExportedWeights:
    """Result of an export."""

    files: list[Path]
    """Files of tensors that were written."""
    notes: list[str]
    """Sentences for the user."""


def export_weights(
    weights: Weights,
    folder: Path,
    format: Format,
    *,
    shard_bytes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportedWeights:
    """Write weights to the new `folder` as `format` names them, with the configuration that the library reads.

    timm: ``timm.create_model("local-dir:FOLDER", pretrained=True)``. transformers: ``from_pretrained("FOLDER")``.

    shard_bytes: maximum bytes of tensors in a file; timm's are always in one.
    progress: callback (tensors done, tensors in total).

    Raises DataError for a model or parts that the library does not have. Raises CheckpointError for a folder that is
    not empty and if writing fails.
    """
    if weights.config.FAMILY not in FAMILIES and weights.config.pretrained is not None:
        # The model that pretraining was for, with a classifier of zeros.
        config, tensors, whole = *weights.config.pretrained, weights
        weights = Weights(
            weights.folder,
            config,
            lambda name: _made(tensors[name], whole) if name in tensors else torch.zeros(config.shape(name)),
        )
    family = FAMILIES.get(weights.config.FAMILY)
    if family is None:
        raise DataError(
            f"{weights.config.name} is a model of your own, which {format} does not have: use --format vitpar"
        )
    made = family.exported(weights.config, format)
    shapes = weights.config.shapes
    # The refusals of each format list single parts; this covers their combinations.
    used = {name for tensor in (*made.tensors.values(), *made.classifier.values()) for name in tensor.names}
    if other := sorted(used ^ shapes.keys()):
        raise DataError(
            f"no model of {format} has the parts of {weights.config.name} together: it cannot hold {listed(other)}, "
            "so use --format vitpar"
        )
    sizes = {
        name: 4 * sum(torch.Size(shapes[ours]).numel() for ours in tensor.names)
        for name, tensor in made.tensors.items()
    }
    texts = {CONFIG: json.dumps({**made.config, "dtype": "float32"}, indent=1)}
    if size := weights.config.image_size:
        texts = image_files(made.config, image_settings(weights), size, format)
    apart = {name: _made(tensor, weights) for name, tensor in made.classifier.items()}
    classifier = {CLASSIFIER: save(apart)} if apart else {}
    files = write_weights(
        folder,
        sizes,
        lambda name: _made(made.tensors[name], weights),
        others={**texts, **classifier},
        shard_bytes=shard_bytes if format == "transformers" else sum(sizes.values()) + 1,
        plain=True,
        progress=progress,
    )
    return ExportedWeights(files, list(made.notes))


def _made(tensor: MadeTensor, weights: Weights) -> Tensor:
    return tensor.make(*map(weights.read, tensor.names)).float().contiguous()
