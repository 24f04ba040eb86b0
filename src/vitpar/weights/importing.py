"""Import of weights of other libraries: open them, infer the model, convert the tensors and write a weights folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vitpar.checkpoint.index import CLASSES, CONFIG, RECIPE
from vitpar.errors import DataError, ModelError
from vitpar.models.config import ModelConfig, field_names
from vitpar.models.convert import refuse_other_fields, shapes_of
from vitpar.models.description import MadeTensor
from vitpar.models.families import config_from_json, config_to_json, family_of, model_config
from vitpar.models.initial import initial_value
from vitpar.models.rows import Shapes
from vitpar.weights.adapters import merging
from vitpar.weights.folder import parameter_shapes, refuse_used, write_weights
from vitpar.weights.foreign import FAMILIES, OWN, open_source, recognised, unwrapped
from vitpar.weights.images import IMAGENET, read_image_hints
from vitpar.weights.shards import refuse_other_shapes

SHARD_BYTES = 5 * 10**9
"""Default maximum of bytes of tensors in a file."""
CLASSIFIERS = tuple(f"head.{name}.{end}" for name in ("fc", "fc_dist") for end in ("weight", "bias"))
"""Names of the parameters of classifiers."""
POSITIONS = "embed.pos_embed"
"""Name of the position embedding."""


@dataclass(frozen=True)
class ImportedWeights:
    """Result of an import."""

    format: str
    """Format of the source: "vitpar", "timm" or "transformers"."""
    config: ModelConfig
    """Configuration of the imported model."""
    files: list[Path]
    """Files of tensors that were written."""
    notes: list[str]
    """Sentences for the user, such as on changes to the weights."""
    new_classifier: bool
    """Whether the classifier has initial values."""


def import_weights(
    path: Path,
    folder: Path,
    *,
    model: str | None = None,
    classes: int | None = None,
    image_size: int | None = None,
    trust: bool = False,
    prefix: str | None = None,
    adapters: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ImportedWeights:
    """Convert the weights in the file or folder `path` to float32 and write them to the new `folder`.

    model: name of the model, for settings that neither the tensors nor a config.json tell.
    classes: number of classes; a classifier with another number is initialised anew with seed 0. None keeps the
        existing one.
    image_size: height and width of images in pixels, to which positions are interpolated; None keeps it.
    trust: whether to read a file that could run code.
    prefix: beginning of the names of the model's tensors; None to find it.
    adapters: folder of low-rank adapters in peft's format, which are merged; None for none.
    shard_bytes: maximum bytes of tensors in a file, unless a single tensor is larger.
    progress: callback (tensors done, tensors in total).

    Raises DataError, ModelError and CheckpointError. Weights that do not fit are refused before anything is written.
    """
    refuse_used(folder)
    source = unwrapped(open_source(path, trust), prefix)
    if adapters is not None:
        source = merging(source, adapters)
    hinted, notes = read_image_hints(source.configs), list(source.notes)
    said: Mapping[str, Any] = source.configs.get("config.json", {})
    there: Any
    if any(name in source.shapes for name in OWN):
        format_name, there = "vitpar", own_config(path, source.shapes, said, model)
        made = {name: MadeTensor((name,)) for name in source.shapes}
    else:
        # A classifier is wanted: its classes are given, or a model that has one is named.
        classifies = classes is not None or (model is not None and "num_classes" in field_names(family_of(model)))
        family, found = recognised(path, source.shapes, classifies=classifies)
        format_name, there = found.format, family.infer_config(path, found, family.said(said), model)
        made, notes = family.parts(found, there), [*notes, *found.notes]
    notes += hinted.notes
    if not there.image_size and (classes is not None or image_size is not None):
        raise DataError(f"'{path}' is a model of text: leave --classes and --image-size out")
    if hinted.data is None and there.image_size:
        notes.append("image normalisation is unknown: recipe.toml uses ImageNet's mean and std")
    classifier = bool(there.image_size) and "num_classes" in field_names(type(there))
    if classes is not None and not classifier:
        raise DataError(f"'{path}' is {there.name}, which has no classes: leave --classes out")
    headless = classifier and not any(name in made for name in CLASSIFIERS)
    if headless and classes is None:
        raise DataError(f"'{path}' has no classifier: set the number of classes of a new one with --classes N")
    needed = parameter_shapes(there, most=len(source.shapes))
    if headless:
        needed = {name: shape for name, shape in needed.items() if name not in CLASSIFIERS}
    refuse_other_shapes(path, shapes_of(path, made, source.shapes), needed, exactly=True)

    config = there
    if there.image_size:
        sizes = {"num_classes": classes or there.num_classes} if classifier else {}
        config = replace(there, image_size=image_size or there.image_size, **sizes)
    reset = {name for name in CLASSIFIERS if classes is not None and (headless or classes != there.num_classes)}
    if reset:
        was = "the file has none" if headless else f"the file has {there.num_classes:,}"
        notes.append(f"the classifier of {classes:,} classes is newly initialised ({was})")
    if config.image_size != there.image_size:
        notes.append(resized(there, config))

    def read(name: str) -> Tensor:
        if name in reset:
            return initial_value(name, torch.Size(config.shapes[name]), 0, config)
        part = made[name]
        whole = part.make(*map(source.read, part.names)).float()
        if not whole.isfinite().all():
            raise DataError(f"{' and '.join(part.names)} in '{path}' has non-finite numbers: do not use it")
        if name == POSITIONS and config.image_size != there.image_size:
            whole = resampled(whole, *grid_of(config, config.shapes[name]))
        return whole.clone(memory_format=torch.contiguous_format)

    texts = {
        CONFIG: json.dumps(config_to_json(config), indent=1),
        RECIPE: _recipe(path, folder, config, dict(hinted.data or IMAGENET)),
    }
    if hinted.class_names and not reset and len(hinted.class_names) == config.num_classes:
        texts[CLASSES] = json.dumps(hinted.class_names)
    files = write_weights(
        folder,
        {name: 4 * torch.Size(shape).numel() for name, shape in config.shapes.items()},
        read,
        others=texts,
        shard_bytes=shard_bytes,
        progress=progress,
    )
    return ImportedWeights(format_name, config, files, notes, new_classifier=bool(reset))


def own_config(path: Path, shapes: Shapes, said: Mapping[str, Any], model: str | None) -> ModelConfig:
    """Return the configuration of weights of vitpar: their config.json, or that of the model that is named.

    Raises DataError if there is neither, or if they contradict each other.
    """
    try:
        config = config_from_json(said).unadapted if said else None
    except ModelError as error:
        raise DataError(f"config.json of '{path}' cannot be used: {error}") from None
    if model is None:
        if config is None:
            raise DataError(
                f"the tensors in '{path}' do not show the number of heads: name the model with --model, or use the "
                "folder with its config.json"
            )
        return config
    classifier = shapes.get(CLASSIFIERS[0])
    named = model_config(model, **({"num_classes": classifier[0]} if classifier else {}))
    if config is not None:
        if type(config) is not type(named):
            raise DataError(f"'{path}' is {config.name}, not a {model}: name another model, or omit --model")
        if family := FAMILIES.get(named.FAMILY):  # a model of one's own has none
            refuse_other_fields(path, named, config, family.compared)
    return config or named


def resized(before: ModelConfig, after: ModelConfig) -> str:
    """Return a sentence for the user on what changes with the size of the images.

    Raises DataError if parameters would need other shapes that nothing can interpolate.
    """
    others = [name for name, shape in before.shapes.items() if shape != after.shapes[name] and name not in CLASSIFIERS]
    pixels = f"images have {after.image_size} pixels instead of {before.image_size}"
    if not others:
        return pixels
    if others != [POSITIONS]:
        raise DataError(
            f"{others[0]} of {before.name} cannot be resized to images of {after.image_size} pixels: keep images of "
            f"{before.image_size}"
        )
    sides = [grid_of(config, config.shapes[POSITIONS])[1] for config in (before, after)]
    return (
        f"position embeddings are interpolated from {sides[0]}x{sides[0]} to {sides[1]}x{sides[1]} patches ({pixels})"
    )


def grid_of(config: ModelConfig, positions: tuple[int, ...]) -> tuple[int, int]:
    """Return (tokens before the patches, patches along a side). positions: shape of the position embedding."""
    patches = next(part.tokens for part in config.first_layer.parts if part.role == "embedding")
    return positions[1] - patches, math.isqrt(patches)


def resampled(positions: Tensor, prefix: int, grid: int) -> Tensor:
    """Interpolate learned positions of a square grid of patches to another grid.

    The interpolation is bicubic with antialiasing, computed in float32, as in timm's `resample_abs_pos_embed`
    (timm/layers/pos_embed.py, 1.0).

    positions: [1, prefix + old², width].
    prefix: number of tokens before the patches, whose positions are kept.
    grid: new number of patches along a side.

    Returns [1, prefix + grid², width].
    """
    tokens, patches = positions[:, :prefix], positions[:, prefix:]
    old = round(patches.shape[1] ** 0.5)
    image = rearrange(patches.float(), "1 (h w) d -> 1 d h w", h=old)
    image = F.interpolate(image, size=(grid, grid), mode="bicubic", antialias=True)
    return torch.cat([tokens, rearrange(image, "1 d h w -> 1 (h w) d").to(positions.dtype)], dim=1)


def _recipe(path: Path, folder: Path, config: ModelConfig, data: dict[str, Any]) -> str:
    """Return a recipe, as TOML, that fine-tunes the model and prepares images as in its original training."""
    values = {
        **({"task": {"name": config.TASK}} if config.TASK != ModelConfig.TASK else {}),
        "model": model_section(config),
        **({"data": data} if config.image_size else {}),
        "optimizer": {"lr": 1e-4},
        "train": {"epochs": 10},
    }
    comment = f"# Imported from {str(path)!r}. To fine-tune: vitpar train --weights FOLDER --data DIR"
    return f"{comment}\n{tomli_w.dumps(values)}"


def model_section(config: ModelConfig) -> dict[str, Any]:
    """Return the section [model] of a recipe: the name, and the settings that differ from the model of that name."""
    defaults = {field.name: field.default for field in fields(config)}  # type: ignore[arg-type]
    try:
        plain = config_to_json(model_config(config.name))
    except ModelError:
        plain = defaults
    # The data determine the number of classes, and images of a recipe have three channels.
    names = [name for name in defaults if name not in ("name", "num_classes", "channels")]
    # Data may have fewer token ids than the model, as T5's tokenizers do.
    changed = {x: value for x in names if (value := getattr(config, x)) != plain[x] or x == "vocab_size"}
    if not config.image_size or "num_classes" not in defaults:
        return {"name": config.name, **({"options": changed} if changed else {})}
    if None in changed.values():  # TOML has no word for what the named model has and this one lacks
        changed = {name: value for name in names if (value := getattr(config, name)) != defaults[name]}
        return {"name": f"{config.FAMILY}_custom", **changed}
    return {"name": config.name, **changed}
