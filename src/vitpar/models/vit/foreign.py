"""Conversion of a ViT's parameters from other libraries: their names, and how their tensors become vitpar's.

There are three formats, recognised by the name of the patch projection: timm's (``timm/models/vision_transformer.py``
and ``deit.py``, 1.0, which includes the files of DeiT, DeiT III and the original ViT), transformers'
(``modeling_vit.py`` and ``modeling_deit.py``, 4 and 5), and vitpar's own. Regular expressions map the names to
vitpar's. The tensors then differ as follows:

- transformers has separate queries, keys and values, and timm orders their rows (q|k|v, head, feature) where vitpar has
  (head, q|k|v, feature).
- Both project patches by a convolution; flattening the last three dimensions of its weight gives vitpar's weight.
- timm may add no position embedding to the tokens before the patches, which is equivalent to zeros.
- A class token that is not read (mean pooling), or a distillation token without a classifier, is a register in vitpar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from vitpar.errors import DataError, ModelError
from vitpar.models.families import model_config
from vitpar.models.foreign import ImportHints, MappedParameter, Patterns, Renamed, Shapes, dimension, format_of, mapped
from vitpar.models.vit.config import SIZES, ViTConfig

_END = r"(\.weight|\.bias)"
_BLOCK = r"(?:vit\.|deit\.)?(?:encoder\.layer|layers)\.(\d+)\."
_EMBEDDINGS = r"(?:vit\.|deit\.)?embeddings\."
FORMATS: dict[str, Patterns] = {
    "vitpar": (("((?:embed|blocks|head)\\..+)", r"\1"),),
    "timm": (
        (rf"patch_embed\.proj{_END}", r"embed.patch_embed.proj\1"),
        (r"(cls_token|dist_token|reg_token|pos_embed)", r"embed.\1"),
        (r"blocks\.(\d+)\.(?:ls([12])\.gamma|gamma_([12]))", r"blocks.\1.ls\2\3.gamma"),
        (rf"(blocks\.\d+\.(?:norm[12]|attn\.(?:qkv|proj|q_norm|k_norm)|mlp\.fc[12])){_END}", r"\1\2"),
        (rf"norm{_END}", r"head.norm\1"),
        (rf"pre_logits\.fc{_END}", r"head.representation\1"),
        (rf"head{_END}", r"head.fc\1"),
        (rf"head_dist{_END}", r"head.fc_dist\1"),
    ),
    "transformers": (
        (rf"{_EMBEDDINGS}patch_embeddings\.projection{_END}", r"embed.patch_embed.proj\1"),
        (rf"{_EMBEDDINGS}cls_token", "embed.cls_token"),
        (rf"{_EMBEDDINGS}distillation_token", "embed.dist_token"),
        (rf"{_EMBEDDINGS}position_embeddings", "embed.pos_embed"),
        (rf"{_BLOCK}layernorm_before{_END}", r"blocks.\1.norm1\2"),
        (rf"{_BLOCK}layernorm_after{_END}", r"blocks.\1.norm2\2"),
        (rf"{_BLOCK}attention\.(?:attention\.)?([qkv])(?:uery|ey|alue|_proj){_END}", r"blocks.\1.attn.\2\3"),
        (rf"{_BLOCK}attention\.(?:output\.dense|o_proj){_END}", r"blocks.\1.attn.proj\2"),
        (rf"{_BLOCK}(?:intermediate\.dense|mlp\.fc1){_END}", r"blocks.\1.mlp.fc1\2"),
        (rf"{_BLOCK}(?:output\.dense|mlp\.fc2){_END}", r"blocks.\1.mlp.fc2\2"),
        (rf"(?:vit\.|deit\.)?layernorm{_END}", r"head.norm\1"),
        (rf"(?:cls_)?classifier{_END}", r"head.fc\1"),
        (rf"distillation_classifier{_END}", r"head.fc_dist\1"),
    ),
}
"""Patterns of names by format."""
MARKS = {
    "vitpar": r"embed\.patch_embed\.proj\.weight",
    "timm": r"patch_embed\.proj\.weight",
    "transformers": rf"{_EMBEDDINGS}patch_embeddings\.projection\.weight",
}
"""Name of the patch projection, which identifies a format."""
TRANSFORMERS_EPS = 1e-12
"""Default epsilon of LayerNorms in transformers' models."""
LAYER_SCALE = 1e-5
"""Default initial layer scale; it does not affect imported parameters."""
_POOLER = re.compile(r"(?:vit\.|deit\.)?pooler\.dense\.(?:weight|bias)")


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


def renamed(shapes: Shapes) -> Renamed | None:
    """Recognise the format of foreign tensors and map their names to vitpar's; None for another family's tensors."""
    format = format_of(MARKS, shapes)
    if format is None:
        return None
    skipped = {name: shape for name, shape in shapes.items() if format == "transformers" and _POOLER.fullmatch(name)}
    names, unknown = mapped((name for name in shapes if name not in skipped), FORMATS[format])
    notes = ("the pooler is dropped, since no classifier of transformers uses it",) if skipped else ()
    ours = {name: shapes[foreign] for name, foreign in names.items()}
    return Renamed(format, names, ours, tuple(unknown), skipped, notes)


def parts(found: Renamed, config: ViTConfig) -> dict[str, MappedParameter]:
    """Return how each parameter of vitpar is made of the tensors that were found, by vitpar's name.

    The result is not checked: parameters may be missing or superfluous, and shapes may differ from those of `config`.
    """
    made = {ours: MappedParameter((name,), found.shapes[ours]) for ours, name in found.names.items()}
    if found.format != "vitpar":
        _unfold_patches(made)
        _fuse_queries(made, config.num_heads)
        _make_registers(made, config)
    _complete_positions(made, config)
    return made


def _unfold_patches(made: dict[str, MappedParameter]) -> None:
    part = made.get("embed.patch_embed.proj.weight")
    if part and len(part.shape) == 4:
        shape = (part.shape[0], part.shape[1] * part.shape[2] * part.shape[3])
        made["embed.patch_embed.proj.weight"] = MappedParameter(part.names, shape, lambda kernel: kernel.flatten(1))


def _fuse_queries(made: dict[str, MappedParameter], heads: int) -> None:
    """Reorder the rows of q, k and v, from one tensor or three, to (head, q|k|v, feature)."""

    def ordered(*tensors: Tensor) -> Tensor:
        return rearrange(torch.cat(tensors), "(three h d) ... -> (h three d) ...", three=3, h=heads)

    blocks = dict.fromkeys(".".join(name.split(".")[:2]) for name in made if name.startswith("blocks."))
    for block in blocks:
        for end in ("weight", "bias"):
            fused = f"{block}.attn.qkv.{end}"
            apart = [f"{block}.attn.{letter}.{end}" for letter in "qkv"]
            if all(name in made for name in apart):
                three = [made.pop(name) for name in apart]
                if len({part.shape for part in three}) == 1:
                    rows, *columns = three[0].shape
                    made[fused] = MappedParameter(tuple(part.names[0] for part in three), (3 * rows, *columns), ordered)
            elif fused in made:
                made[fused] = MappedParameter(made[fused].names, made[fused].shape, ordered)


def _make_registers(made: dict[str, MappedParameter], config: ViTConfig) -> None:
    """Turn tokens that the head does not read into registers, in the order of the tokens."""
    unread = [
        *(["embed.cls_token"] if config.pool == "avg" else []),
        *(["embed.dist_token"] if not config.distillation else []),
    ]
    tokens = [made.pop(name) for name in unread if name in made]
    if not tokens:
        return
    if "embed.reg_token" in made:
        tokens.append(made.pop("embed.reg_token"))
    count = sum(part.shape[1] for part in tokens if len(part.shape) == 3)
    names = tuple(name for part in tokens for name in part.names)
    made["embed.reg_token"] = MappedParameter(names, (1, count, config.embed_dim), lambda *each: torch.cat(each, dim=1))


def _complete_positions(made: dict[str, MappedParameter], config: ViTConfig) -> None:
    """Add zero position embeddings for the tokens before the patches if there are none for them."""
    part = made.get("embed.pos_embed")
    if part and part.shape == (1, config.patches, config.embed_dim) and config.prefix_tokens:
        zeros = torch.zeros(1, config.prefix_tokens, config.embed_dim)
        shape = (1, config.tokens, config.embed_dim)
        made["embed.pos_embed"] = MappedParameter(
            part.names, shape, lambda table: torch.cat([zeros.to(table.dtype), table], dim=1)
        )


def infer_config(place: object, found: Renamed, hints: ViTHints, model: str | None = None) -> ViTConfig:
    """Return the configuration of the model. A model without classifier gets one class.

    place: origin of the tensors, for messages.
    model: name of the model, for settings that neither tensors nor hints give; None if not named.

    Raises DataError for tensors that are not those of a ViT or that contradict the name.
    Raises ModelError for an unknown name.
    """
    named = model_config(model) if model is not None else None
    if named is not None and not isinstance(named, ViTConfig):
        raise DataError(f"'{place}' is a ViT, not a {model}: name another model, or omit --model")
    shapes = found.shapes

    def size(name: str, dim: int) -> int:
        return dimension(place, shapes, name, dim, "a ViT")

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
