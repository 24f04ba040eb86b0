"""Elements that operations other than matrix products and attention read and write, for one row, by arithmetic.

`usual_elements` is a formula for compiled layers of any code base; constants of the estimate and rates of clusters are
fitted to published runs with it. vitpar's compiled blocks differ from it by the tables below, which were counted with
`experiments/dry_bench.py`. A pass is a read or write of tokens x width.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from vitpar.models.config import ModelConfig
from vitpar.models.description import LayerDescription
from vitpar.models.swin.config import SwinConfig
from vitpar.models.vit.config import ViTConfig
from vitpar.planner.profile.activations import given_elements, normed_elements, of_role, taken_elements
from vitpar.strategy import Strategy
from vitpar.strategy.execution import multiplies_in_float8

Directions = tuple[float, float]
"""Numbers for (forward, backward)."""
Table = tuple[tuple[bool, float, float], ...]
"""Rows of (whether it applies, additional passes in forward, in backward)."""


def usual_elements(layer: LayerDescription, strategy: Strategy) -> Directions:
    """Return the elements that a compiled layer reads and writes in (forward, backward). A plain block has 54 passes.

    The elements are those of one rank of a tensor-parallel group.
    """
    t, parts = strategy.degree("tp"), _parts(strategy)
    if layer.name == "embed":
        normed = sum(map(normed_elements, of_role(layer, "norm")))
        forward = (4 * layer.gives.elements + 3 * normed) / parts
    elif layer.name == "head":
        forward = 3 * (layer.takes or layer.gives).elements / parts
    else:
        rows, merges = of_role(layer, "row"), of_role(layer, "merge")
        forward = sum(4 * given_elements(part) / parts + 2 * taken_elements(part) / t for part in rows)
        forward += sum(3 * taken_elements(part) / parts for part in merges)
        if layer.attention and layer.attention.windows > 1:
            forward += 4 * layer.gives.elements / parts  # tokens are moved into windows and back
    return forward, 2 * forward


def vitpar_elements(
    config: ModelConfig, layer: LayerDescription, strategy: Strategy, fp8_min_features: float = math.inf
) -> Directions:
    """Return the elements that a compiled layer of vitpar reads and writes in (forward, backward).

    fp8_min_features: smallest linear layers that multiply in float8, as in ``Execution``; infinity for none. The
    scaling of their inputs is left out.

    Differs from `usual_elements` in blocks of a Vision Transformer that are not parallel, and by the bias of fc1 in
    Swin's. Parallel blocks and models of the user keep the usual bytes. Left out are what gates cost, and that
    norms of queries and keys cost 5 passes more with rotary positions or separate biases.
    """
    forward, backward = usual_elements(layer, strategy)
    if layer.name in ("embed", "head") or not isinstance(config, ViTConfig | SwinConfig):
        return forward, backward
    t = strategy.degree("tp")
    # Tensor parallelism and float8 give linear layers a forward of their own (``vitpar.models.compiled.is_plain``).
    plain = {
        part.name
        for part in layer.parts
        if part.product and t == 1 and not multiplies_in_float8(*part.product, fp8_min_features)
    }
    if isinstance(config, ViTConfig) and not config.parallel_blocks:
        for table, parts in ((_stream(config, plain), _parts(strategy)), (_heads(config, t == 1), t)):
            for applies, more_forward, more_backward in table:
                forward += applies * more_forward * layer.gives.elements / parts
                backward += applies * more_backward * layer.gives.elements / parts
    if not of_role(layer, "gate"):
        # The bias of fc1 is summed in the kernel of the activation's backward.
        backward -= sum(given_elements(part) for part in layer.parts if part.name == "mlp.fc1" and part.name in plain)
    return forward, backward


def _stream(config: ViTConfig, plain: Collection[str]) -> Table:
    """Return the differences around the residual stream of a block.

    plain: names of the linear layers with torch's own forward.
    """
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


def _heads(config: ViTConfig, whole: bool) -> Table:
    """Return the differences between the product for queries, keys and values, and attention.

    whole: whether this rank has all heads.
    """
    unbiased, packs = config.qkv_bias != "all", whole and config.qkv_bias == "all"
    return (
        (packs or unbiased, 0, -3),  # the kernel that packs the gradients sums the bias, if there is one
        (config.qkv_bias == "qv", 4, 2),  # biases of queries and values are added after the product
        (config.rope != "none", 8, 0 if packs else 6),  # rotary positions
        (config.qk_norm, 8, 7),  # norms of queries and keys
    )


def _parts(strategy: Strategy) -> int:
    """Return the number of parts that activations outside the products are split into."""
    return 1 if strategy.mode == "1d" else strategy.degree("tp")
