"""Inference of a Vision Transformer's configuration from foreign tensors and the files next to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from vitpar.errors import DataError, ModelError
from vitpar.models.config import GATED
from vitpar.models.families import model_config
from vitpar.models.foreign import ImportHints, Renamed, Shapes, dimension
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.names import PUBLISHED, SIZES, fields_of

INVISIBLE = (
    *("rope", "rope_temperature", "rope_grid", "rope_register_temperature"),
    *("activation", "norm_eps"),
)
"""Fields that no tensor shows, beside the number of heads and what is read."""
TRANSFORMERS_EPS = 1e-12
"""Default epsilon of LayerNorms in transformers' models."""
LAYER_SCALE = 1e-5
"""Default initial layer scale; it does not affect imported parameters."""


class ViTHints(ImportHints, Protocol):
    """Settings of Vision Transformers from the files next to the tensors, or None."""

    @property
    def heads(self) -> int | None:
        """Number of attention heads."""

    @property
    def pool(self) -> str | None:
        """Pooling, "cls" or "avg"."""

    @property
    def layer_scale(self) -> float | None:
        """Initial layer scale."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Those of `INVISIBLE` that are known, and the kind of positions without parameters, by name."""


def infer_config(place: object, tensors: Renamed, hints: ViTHints, model: str | None = None) -> ViTConfig:
    """Return the configuration of the model. A model without classifier gets one class.

    place: origin of the tensors, for messages.
    model: name of the model, for settings that neither tensors nor hints give; None if not named.

    Raises DataError for tensors that are not those of a ViT or that contradict the name.
    Raises ModelError for an unknown name.
    """
    named = model_config(model) if model is not None else None
    if named is not None and not isinstance(named, ViTConfig):
        raise DataError(f"'{place}' is a ViT, not a {model}: name another model, or omit --model")
    shapes = tensors.shapes

    def size(name: str, dim: int) -> int:
        return dimension(place, shapes, name, dim, "a ViT")

    width = size("embed.patch_embed.proj.weight", 0)
    patch, channels = _patch(size, shapes, hints.patch_size or (named.patch_size if named else None))
    if channels != 3:
        raise DataError(f"'{place}' has {channels} input channels, but only models with 3 can be imported")
    heads = _heads(shapes, width) or hints.heads or (named.num_heads if named else None)
    if heads is None:
        raise DataError(
            f"the tensors in '{place}' do not show the number of heads: name the model with --model"
            f"{_likely(width, patch)}, or use the folder with its config.json"
        )
    hidden = _invisible(place, tensors, hints, named, width, patch)
    # Only vitpar has fixed positions, which are no parameters.
    position = hidden.pop("position", "sincos2d" if tensors.format == "vitpar" and hidden["rope"] == "none" else "none")
    pool = _pool(tensors, hints)
    distilled = "embed.dist_token" in shapes and ("head.fc_dist.weight" in shapes or "head.fc.weight" not in shapes)
    registers = size("embed.reg_token", 1) if "embed.reg_token" in shapes else 0
    if tensors.format != "vitpar":
        registers += "embed.dist_token" in shapes and not distilled
        registers += "embed.cls_token" in shapes and pool != "cls"
    prefix = (pool == "cls") + distilled + registers
    wanted = hints.image_size or (named.image_size if named else None)
    positions = shapes.get("embed.pos_embed")
    table = positions[-2] if positions and len(positions) > 1 else None
    grid, every = (wanted or 224) // patch, True
    if table is not None:
        grid, every = _grid(place, table, prefix, wanted and wanted // patch, tensors.format == "transformers")
    scaled = "blocks.0.ls1.gamma" in shapes
    try:
        config = ViTConfig(
            name=model or "vit_custom",
            patch_size=patch,
            embed_dim=width,
            depth=len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}),
            num_heads=heads,
            image_size=grid * patch,
            num_classes=size("head.fc.weight", 0) if "head.fc.weight" in shapes else 1,
            channels=channels,
            pool=pool,
            num_reg_tokens=registers,
            distillation=distilled,
            representation_size=size("head.representation.weight", 0)
            if "head.representation.weight" in shapes
            else None,
            position="learned" if table is not None else position,
            prefix_positions=every,
            qk_norm=any(f"blocks.0.{name}.weight" in shapes for name in ("attn.q_norm", "q_norm")),
            attn_norm="blocks.0.attn.norm.weight" in shapes,
            mlp_norm="blocks.0.mlp.norm.weight" in shapes,
            fc_norm=_normed_last(tensors) and pool == "avg",
            norm="layer" if "blocks.0.norm1.bias" in shapes else "rms",
            qkv_bias=_biases(shapes),
            layer_scale=(hints.layer_scale or LAYER_SCALE) if scaled else None,
            parallel_blocks="blocks.0.in_proj.weight" in shapes,
            **_mlp(size, shapes, width, hidden.pop("activation")),
            **hidden,
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


def _invisible(
    place: object, tensors: Renamed, hints: ViTHints, named: ViTConfig | None, width: int, patch: int
) -> dict[str, Any]:
    """Return the fields of `INVISIBLE`: as named, else from the files next to the tensors, else the defaults.

    Raises DataError for a model with rotary positions of unknown kind.
    """
    usual = {"norm_eps": TRANSFORMERS_EPS} if tensors.format == "transformers" else {}
    fields = {name: getattr(ViTConfig, name) for name in INVISIBLE} | usual
    if hints.norm_eps is not None:
        fields["norm_eps"] = hints.norm_eps
    fields |= hints.fields
    if any(name.endswith(".rope.freqs") for name in tensors.skipped):  # ViT-5
        known = fields_of("vit5_base_patch16_224") or {}
        fields |= {name: known[name] for name in INVISIBLE if name in known}
    if named is not None:
        fields |= {name: getattr(named, name) for name in INVISIBLE if hints.norm_eps is None or name != "norm_eps"}
    if fields["rope"] != "axial":
        fields["rope_grid"] = None
    if fields["rope"] == "none":  # an architecture that has them, without them
        fields |= {name: getattr(ViTConfig, name) for name in ("rope_temperature", "rope_register_temperature")}
    rotated = "embed.pos_embed" not in tensors.shapes or "blocks.0.attn.q_bias" in tensors.shapes
    without = fields["rope"] == "none" and "rope" not in hints.fields
    if tensors.format == "timm" and rotated and without and named is None:
        raise DataError(
            f"the tensors in '{place}' do not show their rotary positions: name the model with --model"
            f"{_likely(width, patch, 'rope')}, or use the folder with its config.json"
        )
    return fields


def _heads(shapes: Shapes, width: int) -> int | None:
    """Return the number of heads if norms of queries show it."""
    for name in ("blocks.0.attn.q_norm.weight", "blocks.0.q_norm.weight"):
        norm = shapes.get(name)
        if norm and norm[0]:
            return width // norm[0]
    return None


def _normed_last(tensors: Renamed) -> bool:
    """Return whether the last norm comes after the mean over tokens."""
    return tensors.names.get("head.norm.weight") == "fc_norm.weight"


def _pool(tensors: Renamed, hints: ViTHints) -> Any:
    """Return what the classifier reads: "cls", "avg" or "map"."""
    if "head.attn_pool.latent" in tensors.shapes:
        return "map"
    return "avg" if "embed.cls_token" not in tensors.shapes or _normed_last(tensors) or hints.pool == "avg" else "cls"


def _biases(shapes: Shapes) -> Any:
    """Return which of queries, keys and values have biases: "all", "qv" or "none"."""
    if any(f"blocks.0.{name}" in shapes for name in ("attn.qkv.bias", "attn.k.bias", "in_proj.bias")):
        return "all"
    return "qv" if any(f"blocks.0.{name}" in shapes for name in ("attn.q_bias", "attn.q.bias", "q_bias")) else "none"


def _mlp(size: Callable[[str, int], int], shapes: Shapes, width: int, activation: str) -> dict[str, Any]:
    """Return the fields `activation` and `mlp_hidden_dim`. activation: the one of plain MLPs, or the gated one."""
    gated = activation if activation in GATED else "swiglu"
    plain = "gelu" if activation == gated else activation
    if "blocks.0.in_proj.weight" in shapes:
        given, apart = size("blocks.0.in_proj.weight", 0) - 3 * width, "blocks.0.mlp_out.weight"
        taken = size(apart, 1) if apart in shapes else size("blocks.0.out_proj.weight", 1) - width
    elif "blocks.0.mlp.gate.weight" in shapes:
        return {"activation": gated, "mlp_hidden_dim": size("blocks.0.mlp.gate.weight", 0)}
    else:
        given, taken = size("blocks.0.mlp.fc1.weight", 0), size("blocks.0.mlp.fc2.weight", 1)
    return {"activation": gated if given == 2 * taken else plain, "mlp_hidden_dim": taken}


def _patch(size: Callable[[str, int], int], shapes: Shapes, wanted: int | None) -> tuple[int, int]:
    """Return the height of a patch in pixels and the number of channels.

    wanted: height according to hints or the named model; None if unknown.
    """
    if len(shapes["embed.patch_embed.proj.weight"]) == 4:
        return size("embed.patch_embed.proj.weight", 3) or 1, size("embed.patch_embed.proj.weight", 1)
    numbers = size("embed.patch_embed.proj.weight", 1)
    if wanted and numbers % wanted**2 == 0:
        return wanted, numbers // wanted**2
    return max(1, math.isqrt(numbers // 3)), 3  # later checks of shapes refuse a wrong guess


def _grid(place: object, positions: int, prefix: int, wanted: int | None, of_class: bool) -> tuple[int, bool]:
    """Return (patches along a side of the image, whether the tokens before them have positions too).

    positions: number of positions, which may or may not include those of the tokens before the patches.
    prefix: number of tokens before the patches.
    wanted: expected side, which is preferred if both cases are possible; None if unknown.
    of_class: whether the class token alone may have a position, which `_split_positions` adds to it.

    Raises DataError if the patches cannot form a square.
    """
    cases = {positions - prefix: True, positions: prefix == 0}
    if of_class and prefix > 1:
        cases.setdefault(positions - 1, False)
    grids = {math.isqrt(n): every for n, every in reversed(cases.items()) if n > 0 and math.isqrt(n) ** 2 == n}
    if not grids:
        raise DataError(
            f"'{place}' has {positions:,} positions, {prefix} of them before the patches, which form no square grid: "
            "models for images that are not square cannot be imported"
        )
    grid = wanted if wanted in grids else [*grids][-1]
    return grid, grids[grid]


def _likely(width: int, patch: int, words: str = "") -> str:
    """Return a suggestion for --model: a model of that width and patch size; empty if there is none.

    words: of the field that the model must have, "rope"; empty for any.
    """
    if words:
        fits = (name for name in PUBLISHED if words in (f := fields_of(name) or {}) and f["embed_dim"] == width)
        return next((f", perhaps {name}" for name in fits), "")
    family = next((name for name, sizes in SIZES.items() if sizes["embed_dim"] == width), None)
    return f", perhaps {family}_patch{patch}_224" if family else ""
