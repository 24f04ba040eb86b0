"""Export of a Swin Transformer's parameters under timm's names, with its configuration.

It undoes ``vitpar.models.swin.foreign``: what was exported can be imported again.
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

from vitpar.errors import DataError
from vitpar.models.exporting import classifier, linear, patches, refuse, rows
from vitpar.models.foreign import Exported, ExportedTensor
from vitpar.models.swin.config import SHIPPED, SwinConfig


def exported(config: SwinConfig, format_name: str) -> Exported:
    """Return the model as `format_name` has it.

    Raises DataError for transformers, and for an epsilon that timm lacks.
    """
    if format_name != "timm":
        raise DataError(f"{config.name} can be exported to timm, but not to {format_name}: use --format timm or vitpar")
    c = config
    refuse(c, "timm", {f"norms with an epsilon of {c.norm_eps:g}": c.norm_eps != SwinConfig.norm_eps})
    tensors = patches("patch_embed.proj", c.channels, c.patch_size) | linear(
        "patch_embed.norm", "embed.patch_embed.norm"
    )
    for stage in c.stages:
        for index, block in enumerate(stage.blocks):
            theirs, ours = f"layers.{stage.number - 1}.blocks.{index}", f"blocks.{block}"
            if stage.merges(block):
                merging = f"layers.{stage.number - 1}.downsample"
                for name in ("norm.weight", "norm.bias", "reduction.weight"):
                    tensors[f"{merging}.{name}"] = ExportedTensor((f"{ours}.downsample.{name}",), _neighbour_first)
            table = "attn.relative_position_bias_table"
            tensors[f"{theirs}.{table}"] = ExportedTensor((f"{ours}.{table}",), _heads_last)
            for end in ("weight", "bias"):
                tensors[f"{theirs}.attn.qkv.{end}"] = ExportedTensor(
                    (f"{ours}.attn.qkv.{end}",), rows(stage.num_heads, 3)
                )
            for name in ("norm1", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"):
                tensors |= linear(f"{theirs}.{name}", f"{ours}.{name}")
    tensors |= linear("norm", "head.norm") | classifier("head.fc")
    name = c.name.partition(".")[0]
    config_json = {
        "architecture": name if name in SHIPPED and "huge" not in name else "swin_tiny_patch4_window7_224",
        "num_classes": c.num_classes,
        "num_features": c.features,
        "global_pool": "avg",
        "model_args": {
            "img_size": c.image_size,
            "patch_size": c.patch_size,
            "in_chans": c.channels,
            "embed_dim": c.embed_dim,
            "depths": list(c.depths),
            "num_heads": list(c.num_heads),
            "window_size": c.window_size,
            "mlp_ratio": c.mlp_ratio,
            "drop_path_rate": c.drop_path,
        },
    }
    return Exported(tensors, config_json)


def _heads_last(table: Tensor) -> Tensor:
    """table: [heads, offsets, offsets]."""
    return rearrange(table, "h a b -> (a b) h")


def _neighbour_first(merged: Tensor) -> Tensor:
    """merged: tensor whose last dimension has merged features, ordered (feature, neighbour)."""
    return rearrange(merged, "... (c n) -> ... (n c)", n=4)
