"""Layouts: the part of an activation that each rank of a stage holds, computed without tensors.

An activation [batch, tokens, features] between layers is split into equal parts of its batch (rows), and under 2d, 2.5d
and 3d also of its features. Ranks along the other axes hold copies. The parts of the batch follow the rank order: of
the axes that split it, the leftmost is the outermost, except that j is the innermost.

| axis          | embed to head: rows | features | outputs: rows |
|---------------|--------------------|----------|--------------|
| dp, fsdp      | yes                |          | yes          |
| tp 1d         |                    |          |              |
| tp 1d +sp (j) | yes                |          |              |
| d, i          | yes                |          | yes          |
| j of 2d, 2.5d |                    | yes      |              |
| j of 3d       | yes                |          | yes          |
| k of 3d       |                    | yes      |              |
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from itertools import product

from vitpar.models.roles import AXES
from vitpar.strategy.layer import Strategy


@dataclass(frozen=True)
class ActivationPart:
    """Equal part of an activation's batch and features."""

    row: int = 0
    """Index of the part of the batch, from 0."""
    rows: int = 1
    """Number of parts of the batch."""
    feature: int = 0
    """Index of the part of the features, from 0."""
    features: int = 1
    """Number of parts of the features."""

    def row_range(self, batch: int) -> range:
        """Return the indices of the part's rows in a batch of `batch` rows."""
        return _range(self.row, self.rows, batch)

    def feature_range(self, width: int) -> range:
        """Return the indices of the part's features out of `width`."""
        return _range(self.feature, self.features, width)

    def overlap(self, other: ActivationPart, batch: int, width: int) -> tuple[range, range] | None:
        """Return the rows and features that are in both parts; None if there are none."""
        rows = _meet(self.row_range(batch), other.row_range(batch))
        features = _meet(self.feature_range(width), other.feature_range(width))
        return (rows, features) if rows and features else None

    @property
    def share(self) -> float:
        """Share of the activation, above 0 and up to 1."""
        return 1 / (self.rows * self.features)


Layout = tuple[ActivationPart, ...]
"""The part that each rank of a stage holds, in rank order."""


@cache
def mesh_axes(strategy: Strategy) -> tuple[tuple[str, int], ...]:
    """Return the axes of a layer's mesh with their degrees, outermost first: dp, fsdp, and those of `tensor_shape`."""
    return tuple(
        pair
        for axis in strategy.axes
        for pair in (strategy.tensor_shape if axis.role == "tp" else ((axis.role, axis.size),))
    )


@cache
def sharding_axes(strategy: Strategy) -> tuple[str, ...]:
    """Return the axes of a layer's mesh over which ``fully_shard`` shards, outermost first.

    ``vitpar.parallel.mesh`` joins them to the axis `shard`.
    """
    return tuple(name for name, _ in mesh_axes(strategy) if name in ("fsdp", "i") or (name == "dp" and strategy.zero))


@cache
def replicating_axes(strategy: Strategy) -> tuple[str, ...]:
    """Return the axes whose ranks hold copies of a parameter and see different samples, outermost first.

    ``vitpar.parallel.mesh`` joins them to the axis `replicate`.
    """
    sharding = sharding_axes(strategy)
    return tuple(name for name, _ in mesh_axes(strategy) if name in ("dp", "d") and name not in sharding)


def shards_as_fsdp(strategy: Strategy) -> bool:
    """Return whether parameters are sharded over fsdp or i and gathered for each use.

    Under +zero1 and +zero2 they are sharded over dp, but gathered once per step.
    """
    return bool(sharding_axes(strategy)) and not strategy.zero


def place(strategy: Strategy, stage_rank: int) -> dict[str, int]:
    """Return the index of rank `stage_rank` of the stage along each axis of `mesh_axes`."""
    indices: dict[str, int] = {}
    for name, size in reversed(mesh_axes(strategy)):
        stage_rank, indices[name] = divmod(stage_rank, size)
    return indices


@cache
def token_layout(strategy: Strategy) -> Layout:
    """Return the layout of the tokens between layers: embed output, block input and output, head input."""
    return _layout(mesh_axes(strategy), _token_rows(strategy), _features(strategy))


@cache
def image_layout(strategy: Strategy) -> Layout:
    """Return the layout of the images that enter embed: the rows of its tokens."""
    return _layout(mesh_axes(strategy), _token_rows(strategy), ())


@cache
def output_layout(strategy: Strategy) -> Layout:
    """Return the layout of the outputs that leave the head."""
    rows = tuple(name for name in _token_rows(strategy) if name != "j" or not strategy.sequence_parallel)
    return _layout(mesh_axes(strategy), rows, ())


@cache
def token_layout_key(strategy: Strategy) -> tuple[tuple[str, int], ...]:
    """Return a key of `token_layout`, equal for exactly the strategies with equal layouts.

    It lists how each axis splits an activation, outermost first, with neighbouring axes that split alike joined. It
    takes equally long for any number of ranks.
    """
    rows, features, axes = _token_rows(strategy), _features(strategy), mesh_axes(strategy)
    splits: list[tuple[str, int]] = []
    for number, (name, size) in enumerate(axes):
        split = "features" if name in features else "rows" if name in rows else "copies"
        # j is innermost in the order of rows. If a row axis follows it in rank order, the two orders differ.
        if split == "rows" and name == "j" and any(other in rows for other, _ in axes[number + 1 :]):
            split = "inner rows"
        if splits and splits[-1][0] == split:
            size *= splits.pop()[1]
        splits.append((split, size))
    return tuple(splits)


def copies(layout: Layout, stage_rank: int) -> list[int]:
    """Return the ranks of the stage that hold the same part as `stage_rank`, including itself, in order."""
    return [rank for rank, part in enumerate(layout) if part == layout[stage_rank]]


@cache
def row_parts(strategy: Strategy) -> int:
    """Return the number of parts of the batch where the layer splits it most.

    It has to divide the images of a micro-batch.
    """
    sizes = dict(mesh_axes(strategy))
    return math.prod(sizes[name] for name in _token_rows(strategy))


@cache
def token_parts(strategy: Strategy) -> int:
    """Return the number of parts of an activation between layers: 1 / `share` of a part of `token_layout`."""
    sizes = dict(mesh_axes(strategy))
    return row_parts(strategy) * math.prod(sizes[name] for name in _features(strategy))


@dataclass(frozen=True)
class Move:
    """Transfer of a part of an activation between two ranks of a stage."""

    sender: int
    """Rank of the stage that sends; the receiver itself for what it already holds."""
    receiver: int
    """Rank of the stage that receives."""
    rows: range
    """Indices of rows in the complete batch."""
    features: range
    """Indices of features."""

    @property
    def elements(self) -> int:
        """Number of elements per token."""
        return len(self.rows) * len(self.features)


def moves(source: Layout, target: Layout, batch: int, width: int) -> list[Move]:
    """Return the transfers that turn layout `source` into `target`.

    A rank keeps the data that it already holds. If several ranks hold a part, the receivers take turns with them, which
    spreads the load.
    """
    holders: dict[ActivationPart, list[int]] = {}
    for rank, part in enumerate(source):
        holders.setdefault(part, []).append(rank)
    rows, features = source[0].rows, source[0].features
    transfers = []
    for receiver, wanted in enumerate(target):
        for row in _meeting(wanted.row, wanted.rows, rows):
            for feature in _meeting(wanted.feature, wanted.features, features):
                part = ActivationPart(row, rows, feature, features)
                piece = part.overlap(wanted, batch, width)
                assert piece is not None, f"{part} does not meet {wanted}"
                ranks = holders[part]
                sender = receiver if source[receiver] == part else ranks[receiver % len(ranks)]
                transfers.append(Move(sender, receiver, *piece))
    return transfers


@cache
def received_share(source: Layout, target: Layout) -> float:
    """Return the share of the complete activation that the busiest receiver gets in `moves`; 0 if nothing moves."""
    # In the smallest batch and width that both layouts divide, all parts are integers.
    batch = math.lcm(source[0].rows, target[0].rows)
    width = math.lcm(source[0].features, target[0].features)
    most = 0
    for held, wanted in zip(source, target, strict=True):
        kept = held.overlap(wanted, batch, width)
        whole = len(wanted.row_range(batch)) * len(wanted.feature_range(width))
        most = max(most, whole - (len(kept[0]) * len(kept[1]) if kept else 0))
    return most / (batch * width)


def _token_rows(strategy: Strategy) -> tuple[str, ...]:
    """Return the axes that split the batch between layers, outermost first."""
    rows = tuple(name for name, _ in mesh_axes(strategy) if name in ("dp", "fsdp", "d", "i"))
    # j is innermost, so that what ranks along j gather are neighbouring rows.
    return (*rows, "j") if AXES[strategy.mode]["j"] == "batch" else rows


def _features(strategy: Strategy) -> tuple[str, ...]:
    """Return the axes that split the features between layers."""
    return tuple(axis for axis, split in AXES[strategy.mode].items() if split == "features")


@cache
def _layout(axes: tuple[tuple[str, int], ...], rows: tuple[str, ...], features: tuple[str, ...]) -> Layout:
    """Return the layout whose batch is split over the axes `rows` and whose features over the axes `features`.

    axes: `mesh_axes` of a strategy.
    """
    sizes, parts = dict(axes), []
    for indices in product(*(range(size) for _, size in axes)):
        at = dict(zip(sizes, indices, strict=True))
        parts.append(ActivationPart(*joined_index(rows, at, sizes), *joined_index(features, at, sizes)))
    return tuple(parts)


def joined_index(names: Collection[str], at: dict[str, int], sizes: dict[str, int]) -> tuple[int, int]:
    """Return (index over several axes joined, the first outermost; number of indices)."""
    index, count = 0, 1
    for name in names:
        index, count = index * sizes[name] + at[name], count * sizes[name]
    return index, count


def _range(index: int, parts: int, length: int) -> range:
    """Return part `index` of `parts` equal parts of `length` indices."""
    size, rest = divmod(length, parts)
    assert not rest, f"{length} does not divide into {parts} parts"
    return range(index * size, (index + 1) * size)


def _meeting(index: int, parts: int, others: int) -> range:
    """Return which of `others` equal parts overlap part `index` of `parts` equal parts of the same range."""
    return range(index * others // parts, -(-(index + 1) * others // parts))


def _meet(a: range, b: range) -> range:
    """Return the intersection of two ranges of step 1."""
    return range(max(a.start, b.start), min(a.stop, b.stop))
