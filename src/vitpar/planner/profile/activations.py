"""Elements of activations that a layer computes, keeps, moves and needs besides, by arithmetic, for one row.

A row is an image that a tensor-parallel group works on; elements are those of one of its ranks.

`usual_elements`, which operations other than matrix products and attention read and write, is a formula for compiled
layers of any code base; constants of the estimate and rates of clusters are fitted to published runs with it. vitpar's
compiled blocks differ from it by the extra passes of their family (``ModelConfig.extra_passes``), which were counted
with `experiments/dry_bench.py`. A pass is a read or write of tokens x width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from vitpar.models.config import ModelConfig
from vitpar.models.description import LayerDescription, Part
from vitpar.strategy import Strategy
from vitpar.strategy.execution import multiplies_in_float8

Directions = tuple[float, float]
"""Numbers for (forward, backward)."""


def taken(*parts: Part) -> int:
    """Return the elements that linear layers take of one row."""
    return sum(part.tokens * part.product[0] for part in parts if part.product)


def given(*parts: Part) -> int:
    """Return the elements that linear layers give for one row."""
    return sum(part.tokens * part.product[1] for part in parts if part.product)


def normed(*parts: Part) -> int:
    """Return the elements of one row that norms compute."""
    return sum(part.tokens * part.shapes["weight"][0] for part in parts)


def outer_parts(strategy: Strategy) -> int:
    """Return the number of parts that activations outside the products are split into."""
    return 1 if strategy.mode == "1d" else strategy.degree("tp")


def of_role(layer: LayerDescription, *roles: str) -> list[Part]:
    """Return the parts of a layer that have one of `roles`, in order."""
    return [part for part in layer.parts if part.role in roles]


def logits_elements(layer: LayerDescription, strategy: Strategy) -> float:
    """Return the logits of one row that a last layer gives for every token; 0 for those of a classifier."""
    split = strategy.degree("tp") if of_role(layer, "vocabulary_output") else 1
    return layer.gives.elements / split if layer.last and layer.gives.tokens > 1 else 0


def kept_elements(layer: LayerDescription, strategy: Strategy, policy: str) -> Iterator[float]:
    """Yield the elements of a row that a block keeps for backward: its output included, its input not."""
    t, q, mode = strategy.degree("tp"), dict(strategy.tensor_shape)["j"], strategy.mode
    outside = outer_parts(strategy)
    # Of an adapter the few features between its two linear layers, before and after the factor.
    narrow = given(*of_role(layer, "column_a", "row_a")) / (t if mode == "sp" else 1)
    yield layer.gives.elements / outside  # the output
    if policy == "full":
        return
    if policy == "none":
        yield 2 * narrow
        norms, branches = normed(*of_role(layer, "norm")), [*of_role(layer, "merge"), *of_role(layer, "row")]
        yield (norms + given(*branches[:-1])) / outside  # of branches, what is between them
        # Queries, keys, values, attention, and input and output of the activation function; of gates also their own.
        gates = sum(part.tokens * part.width for part in of_role(layer, "gate"))
        inner = taken(*of_role(layer, "row")) + normed(*of_role(layer, "inner_norm")) + gates
        yield (given(*of_role(layer, "column")) + inner) / t
        if mode not in ("1d", "sp"):
            yield norms / t  # normalised inputs, which split norms multiply by their scales
        return
    # selective: results of products, attention and communication
    yield narrow + given(*of_role(layer, "column_b")) / t
    yield given(*of_role(layer, "row_b")) / outside
    shape = layer.attention
    attended = shape.windows * shape.tokens * shape.heads * shape.head_dim if shape else 0
    yield (given(*of_role(layer, "column")) + attended) / t  # queries, keys, values, attention, hidden features
    summed, inputs = given(*of_role(layer, "merge", "row")), taken(*of_role(layer, "column"))
    if mode == "1d":
        yield summed * (2 if t > 1 else 1)  # the last product of each branch, and its sum over the ranks
    elif mode == "sp":
        yield summed + summed / t + inputs  # the same before and after its reduce-scatter, and the gathered inputs
    elif mode == "3d":
        # Gathered inputs, and products before their sum.
        yield (inputs + taken(*of_role(layer, "row")) + given(*of_role(layer, "column")) + summed) / q**2 + summed / t
    else:
        yield summed / t + (inputs + taken(*of_role(layer, "row"))) / q


def transient_elements(layer: LayerDescription, strategy: Strategy) -> float:
    """Return the peak of transient elements of a row on top of what a block keeps for backward."""
    d, t, q = layer.gives.elements, strategy.degree("tp"), dict(strategy.tensor_shape)["j"]
    h = max(map(taken, of_role(layer, "row")), default=d)
    if strategy.tensor_mode == "3d":
        return 2 * h / q**2 + h / t + 2 * d / t
    if strategy.tensor_mode != "1d":
        return 3 * h / q + h / t
    return max(2 * d, h / t) if strategy.sequence_parallel else h / t


def frozen_share(layer: LayerDescription, strategy: Strategy) -> float:
    """Return the share of what a layer keeps for backward that it keeps with its frozen parameters.

    The inputs of its products are only needed for the gradients of weights, unless something else keeps them too, as
    attention does. With checkpointing, and in models of the user, everything counts.
    """
    if strategy.checkpoint or layer.saved is not None or not layer.is_block:
        return 1.0
    rows = of_role(layer, "row")
    needed = {part.name.removesuffix(".lora_A") for part in layer.parts if layer.multiplies_for_weight(part)}
    norms, keeps = 0, False
    for part in reversed(layer.parts):  # column layers take what the norm before them gives
        keeps |= part.role == "column" and part.name in needed
        if part.role == "norm":
            norms, keeps = norms + normed(part) * (not keeps), False
    inner = taken(*(part for part in (rows[1:] if layer.attention else rows) if part.name not in needed))
    needless = norms / outer_parts(strategy) + inner / strategy.degree("tp")
    return 1 - needless / sum(kept_elements(layer, strategy, "none"))


def passing_elements(layer: LayerDescription, strategy: Strategy) -> float:
    """Return the peak of transient elements of a row in a forward that keeps nothing for backward: output included."""
    outside, gives = outer_parts(strategy), layer.gives.elements
    norms = max(map(normed, of_role(layer, "norm")), default=0)
    rows = of_role(layer, "row")
    if not rows:
        return (gives + (layer.takes or layer.gives).elements + norms + taken(*of_role(layer, "embedding"))) / outside
    # Between the two products of an MLP: what goes into the activation function and what comes out of it.
    hidden = max(map(given, of_role(layer, "column")), default=0) + max(map(taken, rows))
    return (gives + norms) / outside + hidden / strategy.degree("tp")


def usual_elements(layer: LayerDescription, strategy: Strategy) -> Directions:
    """Return the elements that a compiled layer reads and writes in (forward, backward). A plain block has 54 passes.

    The elements are those of one rank of a tensor-parallel group.
    """
    t, outside = strategy.degree("tp"), outer_parts(strategy)
    if layer.first:
        forward = (4 * layer.gives.elements + 3 * normed(*of_role(layer, "norm"))) / outside
    elif layer.last:
        # The loss reads logits for their largest one and for differences to it, of which it computes exponentials and
        # their sum in float32. Backward computes them again, and gradients. In 16 bits that is 20 passes in all.
        forward = 3 * (layer.takes or layer.gives).elements / outside + 20 / 3 * logits_elements(layer, strategy)
    else:
        rows = of_role(layer, "row")
        forward = 4 * given(*rows) / outside + 2 * taken(*rows) / t + 3 * taken(*of_role(layer, "merge")) / outside
        # The output of an adapter is added to that of its layer.
        forward += 3 * given(*of_role(layer, "column_b")) / t + 3 * given(*of_role(layer, "row_b")) / outside
        if layer.attention and layer.attention.windows > 1:
            forward += 4 * layer.gives.elements / outside  # tokens are moved into windows and back
    return forward, 2 * forward


def vitpar_elements(
    config: ModelConfig, layer: LayerDescription, strategy: Strategy, fp8_min_features: float = math.inf
) -> Directions:
    """Return the elements that a compiled layer of vitpar reads and writes in (forward, backward).

    fp8_min_features: smallest linear layers that multiply in float8, as in ``Execution``; infinity for none. The
    scaling of their inputs is left out.

    Differs from `usual_elements` in blocks of families that have counted their extra passes, and by the bias of fc1
    there. Models of the user keep the usual bytes.
    """
    forward, backward = usual_elements(layer, strategy)
    if not layer.is_block:
        return forward, backward
    t = strategy.degree("tp")
    # Tensor parallelism and float8 give linear layers a forward of their own (``vitpar.models.compiled.is_plain``).
    plain = {
        part.name
        for part in layer.parts
        if part.product and t == 1 and not multiplies_in_float8(*part.product, fp8_min_features)
    } - {part.name.rpartition(".")[0] for part in layer.parts if part.adapts}
    extra = config.extra_passes(plain, t == 1)
    if extra is None:
        return forward, backward
    for table, parts in zip(extra, (outer_parts(strategy), t), strict=True):
        for applies, more_forward, more_backward in table:
            forward += applies * more_forward * layer.gives.elements / parts
            backward += applies * more_backward * layer.gives.elements / parts
    if not of_role(layer, "gate"):
        # The bias of fc1 is summed in the kernel of the activation's backward.
        backward -= sum(given(part) for part in layer.parts if part.name == "mlp.fc1" and part.name in plain)
    return forward, backward
