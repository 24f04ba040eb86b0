"""Export of weights for timm and transformers: their names, and the configuration files next to the tensors."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

from vitpar.checkpoint.index import CONFIG, RECIPE
from vitpar.data.transforms.names import PILLOW_KERNELS
from vitpar.errors import DataError
from vitpar.io import read_text
from vitpar.limits import MAX_TOML_BYTES
from vitpar.models.bert.exporting import exported as bert
from vitpar.models.config import ModelConfig, field_names
from vitpar.models.foreign import Exported, ExportedTensor
from vitpar.models.mae.exporting import exported as mae
from vitpar.models.swin.exporting import exported as swin
from vitpar.models.t5.exporting import exported as t5
from vitpar.models.vit.exporting import exported as vit
from vitpar.models.vit.to_transformers import labels as transformers_labels
from vitpar.weights.classes import read_class_names
from vitpar.weights.folder import Weights, parameter_shapes, write_weights
from vitpar.weights.hints import IMAGENET
from vitpar.weights.shards import listed

Format = Literal["timm", "transformers"]
FAMILIES: dict[str, Callable[..., Exported]] = {"vit": vit, "swin": swin, "mae": mae, "bert": bert, "t5": t5}
"""Functions from a configuration and a format to the exported model, by family."""
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
    family = FAMILIES.get(weights.config.FAMILY)
    if family is None:
        raise DataError(
            f"{weights.config.name} is a model of your own, which {format} does not have: use --format vitpar"
        )
    made: Exported = family(weights.config, format)
    shapes = parameter_shapes(weights.config, most=weights.config.num_blocks)
    _refuse_other_parameters(weights.config, made, shapes, format)
    sizes = {
        name: 4 * sum(torch.Size(shapes[ours]).numel() for ours in tensor.names)
        for name, tensor in made.tensors.items()
    }
    images = image_settings(weights) if weights.config.image_size else {}
    apart = {name: _made(tensor, weights) for name, tensor in made.classifier.items()}
    classifier = {CLASSIFIER: save(apart)} if apart else {}
    files = write_weights(
        folder,
        sizes,
        lambda name: _made(made.tensors[name], weights),
        others={**_texts(made, weights, format, images), **classifier},
        shard_bytes=shard_bytes if format == "transformers" else sum(sizes.values()) + 1,
        plain=True,
        progress=progress,
    )
    return ExportedWeights(files, list(made.notes))


def _refuse_other_parameters(
    config: ModelConfig, made: Exported, shapes: Mapping[str, tuple[int, ...]], format: Format
) -> None:
    """Raise DataError if the export would leave out a parameter, or needs one that the model lacks.

    The refusals of each format list single parts; this check covers their combinations.
    """
    used = {name for tensor in (*made.tensors.values(), *made.classifier.values()) for name in tensor.names}
    if other := sorted(used ^ shapes.keys()):
        raise DataError(
            f"no model of {format} has the parts of {config.name} together: it cannot hold {listed(other)}, so use "
            "--format vitpar"
        )


def _made(tensor: ExportedTensor, weights: Weights) -> Tensor:
    return tensor.make(*map(weights.read, tensor.names)).float().contiguous()


def image_settings(weights: Weights) -> dict[str, Any]:
    """Return what a user of the model must know, by timm's names: its input, how images are prepared, and its classes.

    mean, std, interpolation, crop_pct and crop_mode are those of the folder's recipe. Without names of the classes,
    label_names is missing.
    """
    try:
        recipe = tomllib.loads(read_text(weights.folder / RECIPE, MAX_TOML_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"{RECIPE} in '{weights.folder}' cannot be read: {error}") from None
    said, c = recipe.get("data"), weights.config
    usual = {**IMAGENET, "interpolation": "bicubic", "crop_pct": 0.875, "crop_mode": "center"}
    given = {name: value for name, value in (said if isinstance(said, dict) else {}).items() if name in usual}
    classes = c.num_classes if "num_classes" in field_names(type(c)) else 0
    names = read_class_names(weights.folder, classes) if classes else None
    labels = {} if names is None else {"label_names": names}
    size = [c.channels, c.image_size, c.image_size]
    return {"num_classes": classes, "input_size": size, **usual, **given, **labels}


def _texts(made: Exported, weights: Weights, format: Format, images: Mapping[str, Any]) -> dict[str, str]:
    """Return the content of the JSON files, by file name. images: as of `image_settings`; empty for a model of text."""
    if not images:
        return {CONFIG: json.dumps({**made.config, "dtype": "float32"}, indent=1)}
    size, names = weights.config.image_size, images.get("label_names")
    if format == "timm":
        labels = {} if names is None else {"label_names": names}
        pretrained = {name: value for name, value in images.items() if name != "label_names"}
        pretrained |= {"fixed_input_size": True, "first_conv": "patch_embed.proj", "classifier": "head"}
        return {CONFIG: json.dumps({**made.config, **labels, "pretrained_cfg": pretrained}, indent=1)}
    if images["crop_mode"] == "border":
        raise DataError("data.crop_mode is 'border', which transformers lacks: use --format timm or vitpar")
    side = math.floor(size / images["crop_pct"])
    squashed = images["crop_mode"] == "squash"
    processor = {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": side, "width": side} if squashed else {"shortest_edge": side},
        "resample": PILLOW_KERNELS.index(images["interpolation"]),
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": images["mean"],
        "image_std": images["std"],
    }
    labelled = {} if names is None or "id2label" not in made.config else transformers_labels(names)
    return {
        CONFIG: json.dumps({**made.config, **labelled, "dtype": "float32"}, indent=1),
        "preprocessor_config.json": json.dumps(processor, indent=1),
    }
