"""Which ranks of a plan send each other something (how many, how far apart, over how many nodes), how long that takes,
and how much memory meanwhile, as the hardware profile has it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from vitpar.errors import PlannerError
from vitpar.planner.profile.profiles import STEPS, Hardware, Link
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.layout import mesh_axes, replicating_axes, sharding_axes


class Links:
    """Seconds of an operation in a group. A group that was not measured takes what the most alike one took, as a ring
    of its size would."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._found: dict[tuple[str, RankGroup], tuple[Link, float, float]] = {}

    def seconds(self, operation: str, group: RankGroup, size: float) -> float:
        """Return the seconds of an operation on `size` bytes, counted as `Link` describes."""
        if group.alone or not size:
            return 0.0
        link, more_messages, more_bytes = self._link(operation, group)
        if more_messages == more_bytes == 1:
            return link.seconds(size)
        latency = min(link.latency, link.seconds(size))
        return latency * more_messages + (link.seconds(size) - latency) * more_bytes

    def scratch(self, operation: str, group: RankGroup, size: float) -> float:
        """Bytes that it takes meanwhile, besides what is sent and received."""
        return 0.0 if group.alone or not size else self._link(operation, group)[0].scratch(size)

    def _link(self, operation: str, group: RankGroup) -> tuple[Link, float, float]:
        key = operation, group
        if key not in self._found:
            self._found[key] = self._closest(operation, group)
        return self._found[key]

    def _closest(self, operation: str, group: RankGroup) -> tuple[Link, float, float]:
        candidates = [link for link in self._hardware.links if link.operation == operation]
        if not candidates:
            raise PlannerError(
                f"the hardware profile '{self._hardware.name}' has no {operation}, which plans of more than one rank "
                "need: measure more ranks with vitpar profile hardware --ranks"
            )

        def distance(link: Link) -> tuple[float, ...]:
            nodes = abs(math.log(link.nodes / group.nodes))
            return (
                (link.nodes > 1) != (group.nodes > 1),
                abs(math.log(link.ranks / group.ranks)) + nodes,
                abs(math.log(link.stride / group.stride)),
            )

        link = min(candidates, key=distance)
        measured, wanted = STEPS[operation](link.ranks), STEPS[operation](group.ranks)
        return link, wanted[0] / measured[0], wanted[1] / measured[1]


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks that communicate."""

    ranks: int = 1
    """Number of ranks."""
    stride: int = 1
    """Distance from one rank to the next, at least."""
    nodes: int = 1
    """Number of nodes that the ranks are on."""

    @property
    def alone(self) -> bool:
        """Whether the group is a single rank, which sends nothing."""
        return self.ranks == 1


@dataclass(frozen=True)
class Groups:
    """Those of a layer (``vitpar.parallel.mesh``) and of its stage.

    replicate: hold copies of its parameters. shard: parts, which they gather. j, k: parts that they compute with.
    """

    replicate: RankGroup
    shard: RankGroup
    j: RankGroup
    k: RankGroup
    stage: RankGroup


@cache
def layer_groups(strategy: Strategy, outer: tuple[int, int], ranks_per_node: int) -> Groups:
    """The groups of a layer. outer: (axes inner to pp, pipeline degree), as `placed` gives it."""
    axes, stride = {}, 1
    inner, pp = outer
    behind = _inner_ranks(strategy, inner)
    for name, size in reversed(mesh_axes(strategy)):
        axes[name] = (size, stride * (pp if stride >= behind else 1))
        stride *= size

    def group(*names: str) -> RankGroup:
        return _group(tuple(axes[name] for name in names if name in axes), ranks_per_node)

    return Groups(
        replicate=group(*replicating_axes(strategy)),
        shard=group(*sharding_axes(strategy)),
        j=group("j"),
        k=group("k"),
        stage=group(*axes),
    )


def placed(plan: Plan) -> tuple[int, int]:
    """(how many axes of the strategies stand inside pp in the rank order, pipeline degree); all of them where pp is
    outermost."""
    if not plan.is_uniform or plan.pp_index == 0:
        return -1, plan.pipeline_degree
    return len(plan.strategy.axes) - plan.pp_index, plan.pipeline_degree


def pipeline_group(plan: Plan, ranks_per_node: int) -> RankGroup:
    """A rank and its neighbour along pp."""
    inner, _ = placed(plan)
    return neighbours(_inner_ranks(plan.kinds[0], inner), ranks_per_node)


def neighbours(stride: int, ranks_per_node: int) -> RankGroup:
    """Two ranks that are `stride` apart."""
    return _group(((2, stride),), ranks_per_node)


def all_ranks(ranks: int, ranks_per_node: int) -> RankGroup:
    """All ranks of a world."""
    return _group(((ranks, 1),), ranks_per_node)


def _inner_ranks(strategy: Strategy, inner: int) -> int:
    """Ranks of the last `inner` axes (-1: of all)."""
    ranks = 1
    for axis in reversed(strategy.axes[len(strategy.axes) - inner :] if inner >= 0 else strategy.axes):
        ranks *= axis.size
    return ranks


@cache
def _group(axes: tuple[tuple[int, int], ...], ranks_per_node: int) -> RankGroup:
    """axes: (size, stride) of each that spans the group."""
    members = [0]
    for size, stride in axes:
        members = [first + index * stride for first in members for index in range(size)]
    strides = [stride for size, stride in axes if size > 1]
    return RankGroup(len(members), min(strides, default=1), len({member // ranks_per_node for member in members}))
