"""Groups of ranks that communicate under a plan; time and memory of their operations by the hardware profile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from vitpar.errors import PlannerError
from vitpar.planner.profile.profiles import STEPS, Hardware, Link
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.layout import mesh_axes, replicating_axes, sharding_axes


class Links:
    """Time and memory of an operation in a group of ranks.

    A group that was not measured is scaled from the most similar measured one, as ring algorithms scale.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._found: dict[tuple[str, RankGroup], tuple[Link, float, float]] = {}

    def seconds(self, operation: str, group: RankGroup, size: float) -> float:
        """Return the seconds of an operation on `size` bytes, which are counted as in `Link`.

        Raises PlannerError if the profile has no such operation.
        """
        if group.alone or not size:
            return 0.0
        link, more_messages, more_bytes = self._link(operation, group)
        if more_messages == more_bytes == 1:
            return link.seconds(size)
        # The fitted latency can exceed a measured time, which would leave negative seconds for the bytes.
        latency = min(link.latency, link.seconds(size))
        # More messages repeat the latency, more bytes the rest.
        return latency * more_messages + (link.seconds(size) - latency) * more_bytes

    def scratch(self, operation: str, group: RankGroup, size: float) -> float:
        """Return the transient bytes of an operation on `size` bytes, apart from its inputs and outputs."""
        return 0.0 if group.alone or not size else self._link(operation, group)[0].scratch(size)

    def _link(self, operation: str, group: RankGroup) -> tuple[Link, float, float]:
        """Return `_closest` from a cache."""
        key = operation, group
        if key not in self._found:
            self._found[key] = self._closest(operation, group)
        return self._found[key]

    def _closest(self, operation: str, group: RankGroup) -> tuple[Link, float, float]:
        """Return the most similar measured link, and how many times more messages and bytes a rank of `group` sends."""
        candidates = [link for link in self._hardware.links if link.operation == operation]
        if not candidates:
            raise PlannerError(
                f"the hardware profile '{self._hardware.name}' has no {operation}, which plans of more than one rank "
                "need: measure more ranks with `vitpar profile hardware --ranks`"
            )

        # Crossing nodes matters most, then the numbers of ranks and nodes, then the stride.
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
    """Smallest distance between two ranks."""
    nodes: int = 1
    """Number of nodes that the ranks are on."""

    @property
    def alone(self) -> bool:
        """Return whether the group is a single rank, which sends nothing."""
        return self.ranks == 1


@dataclass(frozen=True)
class Groups:
    """Groups that a rank belongs to: those of a layer's mesh axes (``vitpar.parallel.mesh``) and its stage."""

    replicate: RankGroup
    """Ranks with copies of the layer's parameters, which sum gradients."""
    shard: RankGroup
    """Ranks over which ``fully_shard`` shards the parameters."""
    j: RankGroup
    """Ranks along the tensor axis j."""
    k: RankGroup
    """Ranks along the tensor axis k, of 3d."""
    partial: RankGroup
    """Ranks that sum gradients which are partial over j: those along replicate and j."""
    stage: RankGroup
    """All ranks of the pipeline stage."""


@cache
def layer_groups(strategy: Strategy, outer: tuple[int, int], ranks_per_node: int) -> Groups:
    """Return the groups of a layer.

    outer: (number of axes inside pp, pipeline degree), as `placed` returns it.
    """
    axes, stride = {}, 1
    inner, pp = outer
    behind = _inner_ranks(strategy, inner)
    for name, size in reversed(mesh_axes(strategy)):
        # Axes outside pp in rank order are farther apart by the pipeline degree.
        axes[name] = (size, stride * (pp if stride >= behind else 1))
        stride *= size

    def group(*names: str) -> RankGroup:
        return _group(tuple(axes[name] for name in names if name in axes), ranks_per_node)

    return Groups(
        replicate=group(*replicating_axes(strategy)),
        shard=group(*sharding_axes(strategy)),
        j=group("j"),
        k=group("k"),
        partial=group(*replicating_axes(strategy), "j"),
        stage=group(*axes),
    )


def placed(plan: Plan) -> tuple[int, int]:
    """Return (number of strategy axes inside pp in rank order, pipeline degree); -1 axes if pp is outermost."""
    if not plan.is_uniform or plan.pp_index == 0:
        return -1, plan.pipeline_degree
    return len(plan.strategy.axes) - plan.pp_index, plan.pipeline_degree


def pipeline_group(plan: Plan, ranks_per_node: int) -> RankGroup:
    """Return the group of a rank and its neighbour along pp."""
    inner, _ = placed(plan)
    return neighbours(_inner_ranks(plan.kinds[0], inner), ranks_per_node)


def neighbours(stride: int, ranks_per_node: int) -> RankGroup:
    """Return a group of two ranks that are `stride` apart."""
    return _group(((2, stride),), ranks_per_node)


def all_ranks(ranks: int, ranks_per_node: int) -> RankGroup:
    """Return the group of all ranks of a world."""
    return _group(((ranks, 1),), ranks_per_node)


def _inner_ranks(strategy: Strategy, inner: int) -> int:
    """Return the product of the sizes of the last `inner` axes; -1 for all axes."""
    ranks = 1
    for axis in reversed(strategy.axes[len(strategy.axes) - inner :] if inner >= 0 else strategy.axes):
        ranks *= axis.size
    return ranks


@cache
def _group(axes: tuple[tuple[int, int], ...], ranks_per_node: int) -> RankGroup:
    """Return the group that contains rank 0.

    axes: (size, stride in ranks) of each mesh axis that spans the group.
    """
    members = [0]
    for size, stride in axes:
        members = [first + index * stride for first in members for index in range(size)]
    strides = [stride for size, stride in axes if size > 1]
    return RankGroup(len(members), min(strides, default=1), len({member // ranks_per_node for member in members}))
