"""Elements of activations that a layer computes, keeps for backward and needs besides, by arithmetic, for one row.

A row is an image that a tensor-parallel group works on; elements are those of one of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from vitpar.models.description import LayerDescription, Part
from vitpar.strategy import Strategy


def of_role(layer: LayerDescription, *roles: str) -> list[Part]:
    """Return the parts of a layer that have one of `roles`, in order."""
    return [part for part in layer.parts if part.role in roles]


def taken_elements(part: Part) -> int:
    """Return the elements that a linear layer takes of one row."""
    return part.tokens * part.product[0] if part.product else 0


def given_elements(part: Part) -> int:
    """Return the elements that a linear layer gives for one row."""
    return part.tokens * part.product[1] if part.product else 0


def normed_elements(part: Part) -> int:
    """Return the elements of one row that a norm computes."""
    return part.tokens * part.shapes["weight"][0]


def logits_elements(layer: LayerDescription, strategy: Strategy) -> float:
    """Return the logits of one row that a last layer gives for every token; 0 for those of a classifier."""
    split = strategy.degree("tp") if of_role(layer, "vocabulary_output") else 1
    return layer.gives.elements / split if layer.last and layer.gives.tokens > 1 else 0


def kept_elements(layer: LayerDescription, strategy: Strategy, policy: str) -> Iterator[float]:
    """Yield the elements of a row that a block keeps for backward: its output included, its input not."""
    t, q, mode = strategy.degree("tp"), dict(strategy.tensor_shape)["j"], strategy.mode
    inside = 1 if mode == "1d" else t  # parts that activations outside the products are split into
    columns, rows, merges = (of_role(layer, role) for role in ("column", "row", "merge"))
    # Of an adapter the few features between its two linear layers, before and after the factor.
    narrow = sum(map(given_elements, of_role(layer, "column_a", "row_a"))) / (t if mode == "sp" else 1)
    yield layer.gives.elements / inside  # the output
    if policy == "full":
        return
    residual = sum(map(given_elements, [*merges, *rows][:-1]))  # between the branches
    if policy == "none":
        yield 2 * narrow
        normed = sum(map(normed_elements, of_role(layer, "norm")))
        yield (normed + residual) / inside
        # Queries, keys, values, attention, and input and output of the activation function; of gates also their own.
        inner = sum(map(normed_elements, of_role(layer, "inner_norm")))
        gates = sum(part.tokens * part.width for part in of_role(layer, "gate"))
        yield (sum(map(given_elements, columns)) + sum(map(taken_elements, rows)) + inner + gates) / t
        if mode not in ("1d", "sp"):
            yield normed / t  # normalised inputs, which split norms multiply by their scales
        return
    # selective: results of products, attention and communication
    yield narrow + sum(map(given_elements, of_role(layer, "column_b"))) / t
    yield sum(map(given_elements, of_role(layer, "row_b"))) / inside
    shape = layer.attention
    attended = shape.windows * shape.tokens * shape.heads * shape.head_dim if shape else 0
    yield (sum(map(given_elements, columns)) + attended) / t  # queries, keys, values, attention, hidden features
    summed = sum(map(given_elements, [*merges, *rows]))
    taken = sum(map(taken_elements, columns))
    if mode == "1d":
        yield summed * (2 if t > 1 else 1)  # the last product of each branch, and its sum over the ranks
    elif mode == "sp":
        yield summed + summed / t + taken  # the same before and after its reduce-scatter, and the gathered inputs
    elif mode == "3d":
        # Gathered inputs, and products before their sum.
        every = taken + sum(map(taken_elements, rows)) + sum(map(given_elements, columns)) + summed
        yield every / q**2 + summed / t
    else:
        yield summed / t + (taken + sum(map(taken_elements, rows))) / q


def transient_elements(layer: LayerDescription, strategy: Strategy) -> float:
    """Return the peak of transient elements of a row on top of what a block keeps for backward."""
    d, t, q = layer.gives.elements, strategy.degree("tp"), dict(strategy.tensor_shape)["j"]
    h = max(map(taken_elements, of_role(layer, "row")), default=d)
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
    t, rows = strategy.degree("tp"), of_role(layer, "row")
    inside = 1 if strategy.mode == "1d" else t
    needed = {part.name.removesuffix(".lora_A") for part in layer.parts if layer.multiplies_for_weight(part)}
    normed, keeps = 0, False
    for part in reversed(layer.parts):  # column layers take what the norm before them gives
        keeps |= part.role == "column" and part.name in needed
        if part.role == "norm":
            normed, keeps = normed + normed_elements(part) * (not keeps), False
    inner = rows[1:] if layer.attention else rows
    needless = normed / inside + sum(taken_elements(part) for part in inner if part.name not in needed) / t
    return 1 - needless / sum(kept_elements(layer, strategy, "none"))


def passing_elements(layer: LayerDescription, strategy: Strategy) -> float:
    """Return the peak of transient elements of a row in a forward that keeps nothing for backward: output included."""
    t, taken = strategy.degree("tp"), (layer.takes or layer.gives).elements
    inside = 1 if strategy.mode == "1d" else t
    normed = max(map(normed_elements, of_role(layer, "norm")), default=0)
    columns, rows = of_role(layer, "column"), of_role(layer, "row")
    if not rows:
        pixels = sum(map(taken_elements, of_role(layer, "embedding")))
        return (layer.gives.elements + taken + normed + pixels) / inside
    # Between the two products of an MLP: what goes into the activation function and what comes out of it.
    hidden = max(map(given_elements, columns), default=0) + max(map(taken_elements, rows), default=0)
    return (layer.gives.elements + normed) / inside + hidden / t
