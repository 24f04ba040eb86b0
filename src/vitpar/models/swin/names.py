"""A Swin Transformer's weights in timm (1.0), in Microsoft's original files, and in transformers (4 and 5).

Blocks are numbered within each stage. Microsoft and transformers merge patches at the end of a stage, timm and vitpar
at the beginning of the next. All order merged features (neighbour, feature) where vitpar has (feature, neighbour), and
have tables of relative position biases [offsets · offsets, heads], vitpar's are [heads, offsets, offsets]. Microsoft's
files contain masks, whose shapes show the image size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from einops import rearrange

from vitpar.errors import DataError
from vitpar.limits import MAX_WIDTH
from vitpar.models.convert import Conversion, Exported, Sizes
from vitpar.models.description import block_name
from vitpar.models.rows import (
    KERNEL,
    TIMM,
    Found,
    Library,
    Packing,
    Row,
    Shapes,
    input_size,
    interleaved,
    numbers,
    read_settings,
    refuse_other_parts,
    row,
    settings_of,
    shortest_ratio,
)
from vitpar.models.swin.config import SHIPPED, SwinConfig

_BIASES = Packing(
    lambda c, table: rearrange(table, "(a b) h -> h a b", a=math.isqrt(len(table))),
    lambda c, table: rearrange(table, "h a b -> (a b) h"),
)
_MERGED = Packing(
    lambda c, merged: rearrange(merged, "... (n c) -> ... (c n)", n=4),
    lambda c, merged: rearrange(merged, "... (c n) -> ... (n c)", n=4),
)
_QKV = interleaved(3, lambda c, width: {stage.width: stage.num_heads for stage in c.stages}.get(width, 1))
_PROJECTION, _BLOCK, _BIAS = "embed.patch_embed.proj", "stages.{}.{}", "attn.relative_position_bias_table"


def _merging(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        row(f"{ours}.downsample.norm.*", f"{theirs}.downsample.norm.*", _MERGED),
        row(f"{ours}.downsample.reduction.weight", f"{theirs}.downsample.reduction.weight", _MERGED),
    )


_TIMM_BLOCK, _STAGE = "layers.{}.blocks.{}", "encoder.layers.{}"
_TIMM = (
    row(f"{_PROJECTION}.weight", "patch_embed.proj.weight", KERNEL),
    row(f"{_PROJECTION}.bias", "patch_embed.proj.bias"),
    row("embed.patch_embed.norm.*", "patch_embed.norm.*"),
    row(f"{_BLOCK}.attn.qkv.*", f"{_TIMM_BLOCK}.attn.qkv.*", _QKV),
    row(f"{_BLOCK}.{_BIAS}", f"{_TIMM_BLOCK}.{_BIAS}", _BIASES),
    *(row(f"{_BLOCK}.{x}.*", f"{_TIMM_BLOCK}.{x}.*") for x in ("norm1", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")),
    row("head.norm.*", "norm.*"),
    row("head.fc.*", "head.fc.*"),
    row("head.fc.*", "head.*"),
)
_THEIRS = f"{_STAGE}.blocks.{{}}"
_TRANSFORMERS = (
    row(f"{_PROJECTION}.weight", "embeddings.patch_embeddings.projection.weight", KERNEL),
    row(f"{_PROJECTION}.bias", "embeddings.patch_embeddings.projection.bias"),
    row("embed.patch_embed.norm.*", "embeddings.norm.*"),
    row(f"{_BLOCK}.attn.qkv.*", [f"{_THEIRS}.attention.{x}_proj.*" for x in "qkv"], _QKV),
    row(f"{_BLOCK}.{_BIAS}", f"{_THEIRS}.attention.relative_position_bias_table", _BIASES),
    row(f"{_BLOCK}.norm1.*", f"{_THEIRS}.layernorm_before.*"),
    row(f"{_BLOCK}.attn.proj.*", f"{_THEIRS}.attention.o_proj.*"),
    row(f"{_BLOCK}.norm2.*", f"{_THEIRS}.layernorm_after.*"),
    row(f"{_BLOCK}.mlp.fc1.*", f"{_THEIRS}.mlp.fc1.*"),
    row(f"{_BLOCK}.mlp.fc2.*", f"{_THEIRS}.mlp.fc2.*"),
    *_merging("after.{}", _STAGE),
    row("head.norm.*", "layernorm.*"),
    row("head.fc.*", "classifier.*"),
)
_COMPUTED = ((r".*\.relative_position_index|layers\.\d+\.blocks\.\d+\.attn_mask", ""),)
LIBRARIES = {
    "microsoft": Library(
        r"layers\.0\.downsample\.reduction\.weight", (*_TIMM, *_merging("after.{}", "layers.{}")), needless=_COMPUTED
    ),
    "timm": Library(
        r"layers\.0\.blocks\.0\.attn\.relative_position_bias_table",
        (*_TIMM, *_merging("stages.{}.0", "layers.{}")),
        needless=_COMPUTED,
    ),
    "transformers": Library(
        r"(?:swin\.)?encoder\.layers\.0\.blocks\.0\.attention\..*relative_position_bias_table",
        _TRANSFORMERS,
        spellings=(
            (r"^swin\.", ""),
            (r"attention\.(?:self|relative_position_bias)\.relative", "attention.relative"),
            (r"attention\.self\.([qkv])(?:uery|ey|alue)", r"attention.\1_proj"),
            (r"attention\.output\.dense", "attention.o_proj"),
            (r"intermediate\.dense", "mlp.fc1"),
            (r"output\.dense", "mlp.fc2"),
        ),
        needless=_COMPUTED,
    ),
}
"""Names by library. Microsoft merges patches after the first stage, timm never before it."""
ARGUMENTS = (*TIMM, *numbers(depths="depths", window_size="window_size", mlp_ratio="mlp_ratio"))
"""Arguments of timm's model, which are written; its tensors and `input_size` show them."""


def _grid_of_masks(shapes: Shapes) -> int | None:
    """Return the patches along a side of the image according to the shape of a mask in Microsoft's files, or None."""
    for name, shape in shapes.items():
        if (match := re.fullmatch(r"layers\.(\d{1,3})\.blocks\.\d+\.attn_mask", name)) and len(shape) == 3:
            return math.isqrt(shape[0]) * math.isqrt(shape[1]) * 2 ** int(match[1])
    return None


class SwinWeights(Conversion):
    """Conversion of a Swin Transformer's weights."""

    family = SwinConfig
    title = "a Swin Transformer"
    libraries = LIBRARIES
    compared = ("patch_size", "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio")
    writes = ("timm",)

    def read(self, said: Mapping[str, Any]) -> dict[str, Any]:
        if "model_type" not in said:
            return input_size(said)
        found = read_settings(said, numbers(image_size="image_size"), {"hidden_act": "gelu"})
        if (eps := said.get("layer_norm_eps", SwinConfig.norm_eps)) != SwinConfig.norm_eps:
            # transformers gives this epsilon to some norms only: those of merging and embedding have torch's default.
            raise DataError(f"config.json has layer_norm_eps {eps}, but only {SwinConfig.norm_eps} can be imported")
        return found

    def visible(self, size: Sizes, found: Found, known: Mapping[str, Any]) -> dict[str, Any]:
        shown, width, count = size.of_patches(), size(f"{_PROJECTION}.weight", 0), found.count("stages")
        if count > (most := MAX_WIDTH.bit_length()):
            raise DataError(f"'{size.place}' has {count} stages: models with more than {most} cannot be imported")
        firsts = [f"stages.{stage}.0" for stage in range(count)]
        windows = [(math.isqrt(size(f"{first}.{_BIAS}", 0)) + 1) // 2 for first in firsts]
        window, patch = max(windows, default=1), shown["patch_size"]
        # By default the size for which the last stage has one window, as in the published models.
        image = known.get("image_size", window * 2 ** (count - 1) * patch)
        small = next((stage for stage, side in enumerate(windows) if side < window), None)
        if grid := _grid_of_masks(found.shapes):
            image = grid * patch
        elif small is not None:  # the window of a stage that is smaller has all its tokens
            image = windows[small] * 2**small * patch
        # The window of the model that was named may be larger than every stage.
        usual = known.get("window_size", 0)
        if [min(usual, image // patch >> stage) for stage in range(count)] == windows:
            window = usual
        return shown | {
            "embed_dim": width,
            "depths": tuple(found.count(f"stages.{stage}") for stage in range(count)),
            "num_heads": tuple(size(f"{first}.{_BIAS}", 1) for first in firsts),
            "window_size": window,
            "mlp_ratio": shortest_ratio(
                [width * 2**stage for stage in range(count)], [size(f"{first}.mlp.fc1.weight", 0) for first in firsts]
            ),
            "image_size": image,
            "num_classes": size("head.fc.weight", 0) if "head.fc.weight" in size else 1,
        }

    def layers(self, config: SwinConfig) -> dict[str, str]:
        layers = dict[str, str]()
        for stage in config.stages:
            first = stage.blocks.start
            layers |= {f"stages.{stage.number - 1}.{block - first}": block_name(block) for block in stage.blocks}
            layers |= {f"after.{stage.number - 2}": block_name(first)} if stage.number > 1 else {}
        return layers

    def export(self, config: SwinConfig, format_name: str) -> Exported:
        refuse_other_parts(config, "timm", {"norm_eps": (SwinConfig.norm_eps,)})
        name = config.name.partition(".")[0]
        settings = {
            "architecture": name if name in SHIPPED and "huge" not in name else "swin_tiny_patch4_window7_224",
            "num_classes": config.num_classes,
            "num_features": config.features,
            "global_pool": "avg",
            "model_args": settings_of(config, ARGUMENTS),
        }
        return Exported(self.tensors(config, format_name), settings)
