"""Settings that a model's tensors do not tell, from the files next to them.

These files are config.json, as transformers, timm and vitpar write it, and preprocessor_config.json. Information that
contradicts the tensors is refused, because the shapes of the inferred model's parameters are compared with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitpar.errors import DataError
from vitpar.limits import MAX_MEASURE
from vitpar.models.vit.config import SIZES
from vitpar.text import literal

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""Normalisation by the statistics of ImageNet."""
HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
"""Normalisation to [-1, 1]."""
_EPS = {"vit": 1e-12, "deit": 1e-12, "swin": 1e-5}
"""Epsilon of LayerNorms in transformers' models whose config.json does not give one, by type of model."""
_RESAMPLING = {2: "bilinear", 3: "bicubic"}  # keys are Pillow's numbers


@dataclass(frozen=True)
class Hints:
    """Settings from the files next to the tensors; None for those that they do not give."""

    heads: int | None = None
    """Number of attention heads."""
    pool: str | None = None
    """Pooling, "cls" or "avg"."""
    image_size: int | None = None
    """Height and width of images in pixels."""
    patch_size: int | None = None
    """Height and width of patches in pixels."""
    layer_scale: float | None = None
    """Initial layer scale."""
    norm_eps: float | None = None
    """Epsilon of LayerNorms."""
    data: Mapping[str, Any] | None = None
    """Settings of a recipe's section [data]."""
    class_names: tuple[str, ...] | None = None
    """Names of the classes, in label order."""


def hints(configs: Mapping[str, Mapping[str, Any]]) -> Hints:
    """Return the hints in the JSON files next to the tensors.

    configs: content of the files, by file name.

    Raises DataError for a model that computes differently from vitpar's, and for an invalid epsilon.
    """
    config = configs.get("config.json", {})
    if "model_type" in config:
        return _transformers(config, configs.get("preprocessor_config.json", {}))
    if "architecture" in config:
        return _timm(config)
    pool = config.get("pool")
    return Hints(
        heads=_number(config.get("num_heads")),
        pool=pool if isinstance(pool, str) else None,
        image_size=_number(config.get("image_size")),
        patch_size=_number(config.get("patch_size")),
        layer_scale=_measure(config.get("layer_scale")),
        norm_eps=_measure(config.get("norm_eps")),
    )


def _transformers(config: Mapping[str, Any], images: Mapping[str, Any]) -> Hints:
    kind, activation = config["model_type"], config.get("hidden_act", "gelu")
    if not isinstance(kind, str) or kind not in _EPS:
        raise DataError(f"config.json has model_type {literal(kind)}, but only {', '.join(_EPS)} can be imported")
    if activation != "gelu":
        raise DataError(f"config.json has hidden_act {literal(activation)}, but vitpar's models support only gelu")
    eps = _measure(said := config.get("layer_norm_eps", _EPS[kind]))
    if eps is None:
        raise DataError(f"config.json has layer_norm_eps {literal(said)}, which is not a number: correct it")
    data = dict(HALF if kind == "vit" else IMAGENET) | _colours(images.get("image_mean"), images.get("image_std"))
    if images.get("do_normalize") is False:
        data |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    resample = images.get("resample", 2 if kind == "vit" else 3)
    if isinstance(resample, int) and (resampling := _RESAMPLING.get(resample)) is not None:
        data["interpolation"] = resampling
    data["crop_pct"] = 0.875 if images.get("do_center_crop", kind == "deit") else 1.0
    heads, size = _number(config.get("num_attention_heads")), _number(config.get("image_size"))  # a list in Swin's
    names = _class_names(config.get("id2label"))
    return Hints(heads, "cls", size, _number(config.get("patch_size")), norm_eps=eps, data=data, class_names=names)


def _timm(config: Mapping[str, Any]) -> Hints:
    said = config.get("pretrained_cfg")
    said = {**config, **(said if isinstance(said, dict) else {})}
    data = dict(HALF) | _colours(said.get("mean"), said.get("std"))
    if said.get("interpolation") in tuple(_RESAMPLING.values()):
        data["interpolation"] = said["interpolation"]
    crop = said.get("crop_pct")
    if isinstance(crop, int | float) and 0 < crop <= 1:
        data["crop_pct"] = float(crop)
    family = re.match(r"(?:vit|deit3?)_([a-z]+)_", str(config["architecture"]))
    sizes = SIZES.get(f"vit_{family[1]}") if family else None
    arguments = config.get("model_args")
    heads = _number(arguments.get("num_heads")) if isinstance(arguments, dict) else None
    if heads is None and sizes and _number(config.get("num_features")) in (None, sizes["embed_dim"]):
        heads = sizes["num_heads"]
    size = said.get("input_size")
    pool = {"token": "cls", "avg": "avg"}.get(str(said.get("global_pool")))
    side = _number(size[-1]) if isinstance(size, list) and size else None
    return Hints(heads, pool, side, data=data, class_names=_class_names(config.get("label_names")))


def _colours(mean: Any, std: Any) -> dict[str, tuple[float, ...]]:
    given = {"mean": mean, "std": std}
    found = {
        name: tuple(number for each in value if (number := _measure(each)) is not None)
        for name, value in given.items()
        if isinstance(value, list | tuple) and len(value) == 3
    }
    return {name: numbers for name, numbers in found.items() if len(numbers) == 3}


def _class_names(said: Any) -> tuple[str, ...] | None:
    """Return the names of classes 0, 1, …, from a list or from a table by number; None if `said` is neither."""
    if isinstance(said, dict) and all(str(label) in said for label in range(len(said))):
        said = [said[str(label)] for label in range(len(said))]
    usable = isinstance(said, list) and said and all(isinstance(name, str) for name in said)
    return tuple(said) if usable else None


def _measure(value: Any) -> float | None:
    """Return `value` as a float if it is a number that a recipe may contain, else None."""
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_MEASURE else None


def _number(value: Any) -> int | None:
    """Return `value` if it is a positive integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
