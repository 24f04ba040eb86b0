"""Inference of a model's configuration from its tensors, and of settings they do not tell from files next to them.

These files are config.json, as transformers, timm and vitpar write it, and preprocessor_config.json. The user may also
name the model. Information that contradicts the tensors is refused, because the shapes of the inferred model's
parameters are compared with them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitpar.errors import DataError, ModelError
from vitpar.limits import MAX_MEASURE
from vitpar.models.vit.config import ViTConfig
from vitpar.models.families import model_config
from vitpar.models.vit.config import SIZES
from vitpar.text import literal
from vitpar.weights.formats import Renamed, Shapes

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""Normalisation by the statistics of ImageNet."""
HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
"""Normalisation to [-1, 1]."""
TRANSFORMERS_EPS = 1e-12
"""Epsilon of LayerNorms in transformers' models whose config.json does not give one."""
LAYER_SCALE = 1e-5
"""Initial layer scale if no file tells it; it does not affect imported parameters."""
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


def hints(configs: Mapping[str, Mapping[str, Any]]) -> Hints:
    """Return the hints in the JSON files next to the tensors.

    configs: content of the files, by file name.

    Raises DataError for a model that computes differently from vitpar's ViT, and for an invalid epsilon.
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
    if kind not in ("vit", "deit"):
        raise DataError(f"config.json has model_type {literal(kind)}, but only vit and deit can be imported")
    if activation != "gelu":
        raise DataError(f"config.json has hidden_act {literal(activation)}, but vitpar's ViT supports only gelu")
    eps = _measure(said := config.get("layer_norm_eps", TRANSFORMERS_EPS))
    if eps is None:
        raise DataError(f"config.json has layer_norm_eps {literal(said)}, which is not a number: correct it")
    data = dict(IMAGENET if kind == "deit" else HALF) | _colours(images.get("image_mean"), images.get("image_std"))
    if images.get("do_normalize") is False:
        data |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    resample = images.get("resample", 2 if kind == "vit" else 3)
    if isinstance(resample, int) and (resampling := _RESAMPLING.get(resample)) is not None:
        data["interpolation"] = resampling
    data["crop_pct"] = 0.875 if images.get("do_center_crop", kind == "deit") else 1.0
    heads, size = _number(config.get("num_attention_heads")), _number(config.get("image_size"))
    return Hints(heads, "cls", size, _number(config.get("patch_size")), norm_eps=eps, data=data)


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
    return Hints(heads, pool, _number(size[-1]) if isinstance(size, list) and size else None, data=data)


def _colours(mean: Any, std: Any) -> dict[str, tuple[float, ...]]:
    given = {"mean": mean, "std": std}
    found = {
        name: tuple(number for each in value if (number := _measure(each)) is not None)
        for name, value in given.items()
        if isinstance(value, list | tuple) and len(value) == 3
    }
    return {name: numbers for name, numbers in found.items() if len(numbers) == 3}


def _measure(value: Any) -> float | None:
    """Return `value` as a float if it is a number that a recipe may contain, else None."""
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_MEASURE else None


def _number(value: Any) -> int | None:
    """Return `value` if it is a positive integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def infer_config(place: object, found: Renamed, hints: Hints, model: str | None = None) -> ViTConfig:
    """Return the configuration of the model. A model without classifier gets one class.

    place: origin of the tensors, for messages.
    model: name that `model_config` accepts, for settings that nothing else tells; None for none.

    Raises DataError for tensors that are not those of a ViT or that contradict the name.
    Raises ModelError for an unknown name.
    """
    named = model_config(model) if model is not None else None
    shapes, size = found.shapes, _Sizes(place, found.shapes)
    width = size("embed.patch_embed.proj.weight", 0)
    patch, channels = _patch(size, shapes, hints.patch_size or (named.patch_size if named else None))
    if channels != 3:
        raise DataError(f"'{place}' has {channels} input channels, but only models with 3 can be imported")
    norm = shapes.get("blocks.0.attn.q_norm.weight")
    heads = width // norm[0] if norm and norm[0] else hints.heads or (named.num_heads if named else None)
    if heads is None:
        raise DataError(
            f"the tensors in '{place}' do not show the number of heads: name the model with --model"
            f"{_likely(width, patch)}, or use the folder with its config.json"
        )
    read = "embed.cls_token" in shapes and hints.pool != "avg"
    distilled = "embed.dist_token" in shapes and ("head.fc_dist.weight" in shapes or "head.fc.weight" not in shapes)
    registers = size("embed.reg_token", 1) if "embed.reg_token" in shapes else 0
    if found.format != "vitpar":
        registers += ("embed.dist_token" in shapes and not distilled) + ("embed.cls_token" in shapes and not read)
    prefix = read + distilled + registers
    wanted = hints.image_size or (named.image_size if named else None)
    table = size("embed.pos_embed", 1) if "embed.pos_embed" in shapes else None
    grid = _grid(place, table, prefix, wanted and wanted // patch) if table is not None else (wanted or 224) // patch
    scaled = "blocks.0.ls1.gamma" in shapes
    usual = TRANSFORMERS_EPS if found.format == "transformers" else ViTConfig.norm_eps
    try:
        config = ViTConfig(
            name=model or "vit_custom",
            patch_size=patch,
            embed_dim=width,
            depth=len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}),
            num_heads=heads,
            mlp_hidden_dim=size("blocks.0.mlp.fc1.weight", 0),
            image_size=grid * patch,
            num_classes=size("head.fc.weight", 0) if "head.fc.weight" in shapes else 1,
            channels=channels,
            pool="cls" if read else "avg",
            num_reg_tokens=registers,
            distillation=distilled,
            representation_size=size("head.representation.weight", 0)
            if "head.representation.weight" in shapes
            else None,
            position="sincos2d" if table is None and found.format == "vitpar" else "learned",
            qk_norm=norm is not None,
            layer_scale=(hints.layer_scale or LAYER_SCALE) if scaled else None,
            norm_eps=usual if hints.norm_eps is None else hints.norm_eps,
        )
    except ModelError as error:
        raise DataError(f"'{place}' is not a vitpar model: {error}") from None
    for field in ("patch_size", "embed_dim", "depth", "num_heads", "mlp_hidden_dim"):
        if named and getattr(named, field) != getattr(config, field):
            raise DataError(
                f"'{place}' is not a {model}: its {field} is {getattr(config, field)} instead of "
                f"{getattr(named, field)}: name another model, or omit --model"
            )
    return config


class _Sizes:
    """Lookup of the sizes of tensors' dimensions, by name and dimension.

    A call raises DataError if the tensor or the dimension does not exist.
    """

    def __init__(self, place: object, shapes: Shapes) -> None:
        self._place, self._shapes = place, shapes

    def __call__(self, name: str, dim: int) -> int:
        shape = self._shapes.get(name)
        if shape is None:
            raise DataError(f"'{self._place}' lacks {name} (vitpar's name): it is not a supported ViT")
        if dim >= len(shape):
            raise DataError(
                f"{name} (vitpar's name) in '{self._place}' has shape {list(shape)}: it is not a supported ViT"
            )
        return shape[dim]


def _patch(size: _Sizes, shapes: Shapes, wanted: int | None) -> tuple[int, int]:
    """Return the height of a patch in pixels and the number of channels.

    wanted: height according to hints or the named model; None if unknown.
    """
    if len(shapes["embed.patch_embed.proj.weight"]) == 4:
        return size("embed.patch_embed.proj.weight", 3) or 1, size("embed.patch_embed.proj.weight", 1)
    numbers = size("embed.patch_embed.proj.weight", 1)
    if wanted and numbers % wanted**2 == 0:
        return wanted, numbers // wanted**2
    return max(1, math.isqrt(numbers // 3)), 3  # later checks of shapes refuse a wrong guess


def _grid(place: object, positions: int, prefix: int, wanted: int | None) -> int:
    """Return the number of patches along a side of the image.

    positions: number of positions, which may or may not include those of the tokens before the patches.
    prefix: number of tokens before the patches.
    wanted: expected result, which is preferred if both cases are possible; None if unknown.

    Raises DataError if the patches cannot form a square.
    """
    grids = [math.isqrt(n) for n in (positions - prefix, positions) if n > 0 and math.isqrt(n) ** 2 == n]
    if not grids:
        raise DataError(
            f"'{place}' has {positions:,} positions, {prefix} of them before the patches, which form no square grid: "
            "models for images that are not square cannot be imported"
        )
    return wanted if wanted in grids else grids[0]


def _likely(width: int, patch: int) -> str:
    """Return a suggestion for --model: a model of that width and patch size; empty if there is none."""
    family = next((name for name, sizes in SIZES.items() if sizes["embed_dim"] == width), None)
    return f", perhaps {family}_patch{patch}_224" if family else ""
