"""Layouts: which part of an activation every rank of a stage holds, by arithmetic alone.

An activation [batch, tokens, features] between layers is cut into equal parts of its batch (rows), and under 2d, 2.5d
and 3d of its features as well. Axes that cut nothing hold copies. The batch's parts follow the rank order: of the axes
that cut it, the leftmost is the outermost, but j is the innermost.

| axis          | embed to head: rows | features | logits: rows |
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

from vitpar.strategy.layer import Strategy


@dataclass(frozen=True)
class ActivationPart:
    """Part `row` of `rows` equal parts of the batch, and `feature` of `features` of the features, from 0."""

    row: int = 0
    rows: int = 1
    feature: int = 0
    features: int = 1

    def row_range(self, batch: int) -> range:
        """The rows, of `batch` in all."""
        return _range(self.row, self.rows, batch)

    def feature_range(self, width: int) -> range:
        """The features, of `width` in all."""
        return _range(self.feature, self.features, width)

    def overlap(self, other: ActivationPart, batch: int, width: int) -> tuple[range, range] | None:
        """Rows and features that are in both, None where there are none."""
        rows = _meet(self.row_range(batch), other.row_range(batch))
        features = _meet(self.feature_range(width), other.feature_range(width))
        return (rows, features) if rows and features else None

    @property
    def share(self) -> float:
        """How much of the whole it is."""
        return 1 / (self.rows * self.features)


Layout = tuple[ActivationPart, ...]
"""The part of every rank of a stage, in rank order."""


@cache
def mesh_axes(strategy: Strategy) -> tuple[tuple[str, int], ...]:
    """The axes of a layer's mesh with their degrees, outermost first: dp, fsdp, and what tp is arranged as."""
    return tuple(
        pair
        for axis in strategy.axes
        for pair in (strategy.tensor_shape if axis.role == "tp" else ((axis.role, axis.size),))
    )


@cache
def sharding_axes(strategy: Strategy) -> tuple[str, ...]:
    """The axes of a layer's mesh over which ``fully_shard`` shards, outermost first (the axis `shard` in
    ``vitpar.parallel.mesh``)."""
    return tuple(name for name, _ in mesh_axes(strategy) if name in ("fsdp", "i") or (name == "dp" and strategy.zero))


@cache
def replicating_axes(strategy: Strategy) -> tuple[str, ...]:
    """The axes whose ranks hold copies of a parameter and see other samples, outermost first (the axis `replicate`)."""
    sharding = sharding_axes(strategy)
    return tuple(name for name, _ in mesh_axes(strategy) if name in ("dp", "d") and name not in sharding)


def shards_as_fsdp(strategy: Strategy) -> bool:
    """Whether parameters are sharded over fsdp or i, to be gathered whenever they are used; +zero1 and +zero2 gather
    once a step."""
    return bool(sharding_axes(strategy)) and not strategy.zero


def place(strategy: Strategy, stage_rank: int) -> dict[str, int]:
    """The index of a rank of the stage along every axis of `mesh_axes`."""
    found: dict[str, int] = {}
    for name, size in reversed(mesh_axes(strategy)):
        stage_rank, found[name] = divmod(stage_rank, size)
    return found


@cache
def token_layout(strategy: Strategy) -> Layout:
    """Return the layout of the tokens between layers: embed output, block input and output, head input."""
    return _layout(strategy, _token_rows(strategy), _features(strategy))


@cache
def image_layout(strategy: Strategy) -> Layout:
    """Return the layout of the images that enter embed: the rows of its tokens."""
    return _layout(strategy, _token_rows(strategy), ())


@cache
def logit_layout(strategy: Strategy) -> Layout:
    """Return the layout of the logits that leave the head."""
    rows = _token_rows(strategy)
    return _layout(strategy, [name for name in rows if name != "j"] if strategy.sequence_parallel else rows, ())


@cache
def token_layout_key(strategy: Strategy) -> tuple[tuple[str, int], ...]:
    """Equal exactly where `token_layout` is, and quick for any number of ranks: what the ranks hold along the axes,
    outermost first, neighbours that hold the same kind of thing as one."""
    rows, features, axes = _token_rows(strategy), _features(strategy), mesh_axes(strategy)
    found: list[tuple[str, int]] = []
    for place, (name, size) in enumerate(axes):
        kind = "features" if name in features else "rows" if name in rows else "copies"
        if kind == "rows" and name == "j" and any(other in rows for other, _ in axes[place + 1 :]):
            kind = "inner rows"
        if found and found[-1][0] == kind:
            size *= found.pop()[1]
        found.append((kind, size))
    return tuple(found)


def copies(layout: Layout, stage_rank: int) -> list[int]:
    """The ranks of the stage that hold the same part as `stage_rank`, itself included, in order."""
    return [rank for rank, part in enumerate(layout) if part == layout[stage_rank]]


@cache
def row_parts(strategy: Strategy) -> int:
    """Into how many parts the batch is split where it is split most: that many images divide every micro-batch which
    the layer can cut among the ranks of its stage."""
    sizes = dict(mesh_axes(strategy))
    return math.prod(sizes[name] for name in _token_rows(strategy))


@cache
def token_parts(strategy: Strategy) -> int:
    """Into how many parts a batch's tokens are cut between layers: 1 / share of a part of `token_layout`, without
    listing the ranks."""
    sizes = dict(mesh_axes(strategy))
    return row_parts(strategy) * math.prod(sizes[name] for name in _features(strategy))


@dataclass(frozen=True)
class Move:
    """Rows and features that rank `sender` of the stage gives to `receiver` (itself, where it has them already)."""

    sender: int
    receiver: int
    rows: range
    features: range

    @property
    def elements(self) -> int:
        """Elements of every token."""
        return len(self.rows) * len(self.features)


def moves(source: Layout, target: Layout, batch: int, width: int) -> list[Move]:
    """Return the transfers that turn layout `source` into `target`; no rank receives what it already has.

    If several ranks hold a part, the receivers take turns with them.
    """
    holders: dict[ActivationPart, list[int]] = {}
    for rank, part in enumerate(source):
        holders.setdefault(part, []).append(rank)
    rows, features = source[0].rows, source[0].features
    found = []
    for receiver, wanted in enumerate(target):
        for row in _meeting(wanted.row, wanted.rows, rows):
            for feature in _meeting(wanted.feature, wanted.features, features):
                part = ActivationPart(row, rows, feature, features)
                piece = part.overlap(wanted, batch, width)
                assert piece is not None, f"{part} does not meet {wanted}"
                ranks = holders[part]
                sender = receiver if source[receiver] == part else ranks[receiver % len(ranks)]
                found.append(Move(sender, receiver, *piece))
    return found


@cache
def received_share(source: Layout, target: Layout) -> float:
    """How much of the whole activation the rank that receives most has to receive (`moves`): what it is to hold but
    does not. 0 where nothing moves."""
    batch = math.lcm(source[0].rows, target[0].rows)
    width = math.lcm(source[0].features, target[0].features)
    most = 0
    for held, wanted in zip(source, target, strict=True):
        kept = held.overlap(wanted, batch, width)
        whole = len(wanted.row_range(batch)) * len(wanted.feature_range(width))
        most = max(most, whole - (len(kept[0]) * len(kept[1]) if kept else 0))
    return most / (batch * width)


def _token_rows(strategy: Strategy) -> list[str]:
    rows = [name for name, _ in mesh_axes(strategy) if name in ("dp", "fsdp", "d", "i")]
    if strategy.sequence_parallel or strategy.tensor_mode == "3d":
        rows.append("j")  # innermost, so that what ranks along j gather are neighbouring rows
    return rows


def _features(strategy: Strategy) -> tuple[str, ...]:
    return {"1d": (), "2d": ("j",), "2.5d": ("j",), "3d": ("k",)}[strategy.tensor_mode]


def _layout(strategy: Strategy, rows: Collection[str], features: Collection[str]) -> Layout:
    sizes = dict(mesh_axes(strategy))
    parts = []
    for rank in range(strategy.size):
        at = place(strategy, rank)
        parts.append(ActivationPart(*_index(rows, at, sizes), *_index(features, at, sizes)))
    return tuple(parts)


def _index(names: Collection[str], at: dict[str, int], sizes: dict[str, int]) -> tuple[int, int]:
    """The index over several axes together, the first the outermost, and how many there are."""
    index, count = 0, 1
    for name in names:
        index, count = index * sizes[name] + at[name], count * sizes[name]
    return index, count


def _range(index: int, parts: int, length: int) -> range:
    size, rest = divmod(length, parts)
    assert not rest, f"{length} does not divide into {parts} parts"
    return range(index * size, (index + 1) * size)


def _meeting(index: int, parts: int, others: int) -> range:
    """Which of `others` equal parts of a whole meet part `index` of `parts`."""
    return range(index * others // parts, -(-(index + 1) * others // parts))


def _meet(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))
