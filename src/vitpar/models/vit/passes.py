"""Extra passes of compiled blocks of a Vision Transformer, counted with `experiments/dry_bench.py`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from vitpar.models.description import ExtraPasses, PassTable

if TYPE_CHECKING:
    from vitpar.models.vit.config import ViTConfig


def extra_passes(config: ViTConfig, plain: Collection[str], whole: bool) -> ExtraPasses:
    """Return the extra passes of a block. Those of parallel blocks were not counted: they have none.

    plain: names of the linear layers with torch's own forward.
    whole: whether a rank has all heads.

    Left out are what gates cost, and that norms of queries and keys cost 5 passes more with rotary positions or
    separate biases.
    """
    if config.parallel_blocks:
        return ExtraPasses()
    return ExtraPasses(_stream(config, plain), _heads(config, whole))


def _stream(config: ViTConfig, plain: Collection[str]) -> PassTable:
    scales, drops = config.layer_scale is not None, config.drop_path > 0
    # As ``Block._ends_in_products`` of the model.
    ends_in_products = {"attn.proj", "mlp.fc2"} <= {*plain} and not scales and not config.dropout
    return (
        (True, -1, -1),  # the sum after attention is kept for backward
        (ends_in_products, -2, -2),  # fc2 adds to the residual; the biases of proj and fc2 are summed by the norms
        (scales, 0, 7),  # the gradients of layer scale
        (drops, 0, 2 if scales else 4),  # drop-path
        (config.dropout > 0, 0.5, 4),  # dropout
    )


def _heads(config: ViTConfig, whole: bool) -> PassTable:
    unbiased, packs = config.qkv_bias != "all", whole and config.qkv_bias == "all"
    return (
        (packs or unbiased, 0, -3),  # the kernel that packs the gradients sums the bias, if there is one
        (config.qkv_bias == "qv", 4, 2),  # biases of queries and values are added after the product
        (config.rope != "none", 8, 0 if packs else 6),  # rotary positions
        (config.qk_norm, 8, 7),  # norms of queries and keys
    )
