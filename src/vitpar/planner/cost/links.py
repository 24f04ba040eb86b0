"""Groups of ranks that communicate under a plan; time and memory of their operations by the hardware profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from vitpar.errors import PlannerError
from vitpar.planner.profile.profiles import STEPS, Hardware, Link, nics_used, spread
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.layout import mesh_axes, replicating_axes, sharding_axes

_Axes = tuple[tuple[int, int], ...]
"""(size, stride in ranks) of mesh axes."""


class Links:
    """Time and memory of an operation in a group of ranks.

    A group that was not measured is scaled from the most similar measured one, as ring algorithms scale.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._closest_links: dict[tuple[str, RankGroup], tuple[Link, float, float]] = {}

    def seconds(self, operation: str, group: RankGroup, size: float) -> float:
        """Return the seconds of an operation on `size` bytes, which are counted as in `Link`.

        Raises PlannerError if the profile has no such operation.
        """
        if group.alone or not size:
            return 0.0
        link, more_messages, more_bytes = self._closest(operation, group)
        if more_messages == more_bytes == 1:
            return link.seconds(size)
        # The fitted latency can exceed a measured time, which would leave negative seconds for the bytes.
        latency = min(link.latency, link.seconds(size))
        # More messages repeat the latency, more bytes the rest.
        return latency * more_messages + (link.seconds(size) - latency) * more_bytes

    def _closest(self, operation: str, group: RankGroup) -> tuple[Link, float, float]:
        """Return the most similar measured link, and how many times more messages and bytes a rank of `group` sends.

        Cached, and pickled with the costs that ranks are given.
        """
        key = operation, group
        if key in self._closest_links:
            return self._closest_links[key]
        candidates = [link for link in self._hardware.links if link.operation == operation]
        if operation == "p2p" and not any((link.nodes > 1) == (group.nodes > 1) for link in candidates):
            # Equal pairs do not partition an odd number of ranks. On nodes of odd size, some pairs of neighbours cross.
            candidates += [link for link in self._hardware.links if link.operation == "all_gather"]
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
        measured, wanted = STEPS[link.operation](link.ranks), STEPS[operation](group.ranks)
        more_bytes = wanted[1] / measured[1] * self._more_nics(link, group)
        self._closest_links[key] = link, wanted[0] / measured[0], more_bytes
        return self._closest_links[key]

    def _more_nics(self, link: Link, group: RankGroup) -> float:
        """Return how many times more network cards a measured link had on a node than `group` has."""
        per_node, nics = self._hardware.ranks_per_node, self._hardware.nics_per_node
        nodes, here = spread(link.ranks, link.stride, per_node)
        if nodes == 1 or group.nodes == 1:
            return 1.0
        # All ranks of a node sent while the link was measured.
        measured = nics_used(here, here / per_node, per_node, nics)
        return measured / nics_used(group.here, group.share, per_node, nics)


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks that communicate."""

    ranks: int = 1
    """Number of ranks."""
    stride: int = 1
    """Smallest distance between two ranks."""
    nodes: int = 1
    """Number of nodes that the ranks are on."""
    here: int = 1
    """Fewest of its ranks on one of the nodes, if there are several."""
    share: float = 1.0
    """Share of a node's network cards that it gets if all its like act at once: 1 over their number on that node."""

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

    def along(self, axis: str) -> RankGroup:
        """Return the ranks along a tensor axis."""
        return self.j if axis == "j" else self.k


def layer_groups(strategy: Strategy, outer: tuple[int, int], ranks_per_node: int, index: int | None = None) -> Groups:
    """Return the groups of a layer: of each kind the slowest of its stage.

    outer: (number of axes inside pp, pipeline degree), as `placed` returns it.
    index: index of the stage on the pp axis; None for a lower bound: of each kind that of the fastest stage.
    """
    joined = replicating_axes(strategy), sharding_axes(strategy)
    pipeline = outer[1], _inner_ranks(strategy, outer[0])
    return _layer_groups(mesh_axes(strategy), *joined, pipeline, ranks_per_node, index)


@cache
def _layer_groups(
    mesh: tuple[tuple[str, int], ...],
    replicating: tuple[str, ...],
    sharding: tuple[str, ...],
    pipeline: tuple[int, int],
    ranks_per_node: int,
    index: int | None,
) -> Groups:
    """Return what `layer_groups` does. pipeline: (pipeline degree, ranks inside pp)."""
    stride, (pp, behind) = 1, pipeline
    axes = {"pp": pipeline}
    for name, size in reversed(mesh):
        # Axes outside pp in rank order are farther apart by the pipeline degree.
        axes[name] = (size, stride * (pp if stride >= behind else 1))
        stride *= size

    def group(*names: str) -> RankGroup:
        others = tuple(axis for name, axis in axes.items() if name not in (*names, "pp"))
        mine = tuple(axes[name] for name in names if name in axes)
        # Stages at the same place within their nodes have the same groups.
        places = {n * behind % ranks_per_node for n in (range(pp) if index is None else (index,))}
        groups = [_group(mine, others, ranks_per_node, place) for place in places]
        fastest = min(groups, key=lambda one: one.nodes)
        if fastest.nodes == 1:
            return fastest
        return replace(fastest, here=max(one.here for one in groups), share=max(one.share for one in groups))

    return Groups(
        replicate=group(*replicating),
        shard=group(*sharding),
        j=group("j"),
        k=group("k"),
        partial=group(*replicating, "j"),
        stage=group(*(name for name in axes if name != "pp")),
    )


def placed(plan: Plan) -> tuple[int, int]:
    """Return (number of strategy axes inside pp in rank order, pipeline degree); -1 axes if pp is outermost."""
    if not plan.is_uniform or plan.pp_index == 0:
        return -1, plan.pipeline_degree
    return len(plan.strategy.axes) - plan.pp_index, plan.pipeline_degree


def stage_place(plan: Plan, pp: int, ranks_per_node: int) -> int:
    """Return the smallest index on the pp axis whose stage is at the same place within its nodes as that at `pp`."""
    return next(n for n in range(pp + 1) if (pp - n) * _inside(plan) % ranks_per_node == 0)


def hop(plan: Plan, a: int, b: int, ranks_per_node: int, nics_per_node: int | None = None) -> tuple[RankGroup, Wires]:
    """Return (slowest pair of a rank at index `a` of the pp axis and its counterpart at `b`, cards of its messages)."""
    if a == b:  # a schedule with both stages on one rank
        return RankGroup(), ()
    ends = [_stage_ranks(plan, pp) // ranks_per_node for pp in (a, b)]
    crossing, stride = ends[0] != ends[1], abs(b - a) * _inside(plan)
    if not crossing.any():
        return RankGroup(2, stride), ()
    sends, receives = (end[crossing] for end in ends)
    group = RankGroup(2, stride, 2, 1, 1 / max(int(np.bincount(nodes).max()) for nodes in (sends, receives)))
    own = (nics_per_node or ranks_per_node) >= ranks_per_node
    return group, (*_cards("out", a, sends, own), *_cards("in", b, receives, own))


def sharing_group(plan: Plan, places: Sequence[int], ranks_per_node: int) -> RankGroup:
    """Return the group of the ranks that share a parameter between stages. places: their indices on the pp axis."""
    return replace(hop(plan, min(places), max(places), ranks_per_node)[0], ranks=len(places))


Wires = tuple[tuple[str, int], ...]
"""Network cards that an operation uses, as (in or out, node); or (in or out, index of the pp axis) if each rank has its
own card, which all ranks of a stage use alike."""


def stage_wires(plan: Plan, pp: int, ranks_per_node: int, nics_per_node: int | None) -> Wires:
    """Return the cards of all ranks at index `pp` of the pp axis."""
    nodes, own = _stage_ranks(plan, pp) // ranks_per_node, (nics_per_node or ranks_per_node) >= ranks_per_node
    return (*_cards("in", pp, nodes, own), *_cards("out", pp, nodes, own))


def _cards(way: str, pp: int, nodes: NDArray[np.int64], own: bool) -> Wires:
    """Return the cards that ranks on `nodes` at index `pp` of the pp axis use. own: whether each rank has one."""
    return ((way, pp),) if own else tuple((way, int(node)) for node in np.unique(nodes))


def _stage_ranks(plan: Plan, pp: int) -> NDArray[np.int64]:
    """Return the ranks at index `pp` of the pp axis, in order."""
    inside = _inside(plan)
    return pp * inside + _ranks(((plan.stage_size // inside, inside * plan.pipeline_degree), (inside, 1)))


def all_ranks(ranks: int, ranks_per_node: int) -> RankGroup:
    """Return the group of all ranks of a world."""
    return _group(((ranks, 1),), (), ranks_per_node)


def _inner_ranks(strategy: Strategy, inner: int) -> int:
    """Return the product of the sizes of the last `inner` axes; -1 for all axes."""
    return math.prod(axis.size for axis in strategy.axes[len(strategy.axes) - inner if inner >= 0 else 0 :])


def _inside(plan: Plan) -> int:
    """Return the number of ranks inside pp in rank order."""
    return _inner_ranks(plan.distinct[0], placed(plan)[0])


@cache
def _group(axes: _Axes, others: _Axes, ranks_per_node: int, first: int = 0) -> RankGroup:
    """Return the group, of those along some mesh axes, that is on most nodes.

    axes: those that span the group.
    others: all others of its stage; the groups along them communicate at the same time.
    first: first rank of the stage.
    """
    members = first + _ranks(others)[:, None] + _ranks(axes)
    strides = [stride for size, stride in axes if size > 1]
    nodes = np.sort(members // ranks_per_node, axis=1)
    most = int((np.diff(nodes, axis=1) > 0).sum(axis=1).max(initial=0)) + 1
    if most == 1:
        return RankGroup(members.shape[1], min(strides, default=1))
    crossing = nodes[nodes[:, 0] != nodes[:, -1]]
    # Number of members of each group on each of its nodes.
    groups = np.repeat(np.arange(len(crossing)), crossing.shape[1])
    pairs, here = np.unique(np.stack((groups, crossing.ravel())), axis=1, return_counts=True)
    together = int(np.bincount(pairs[1]).max())
    return RankGroup(members.shape[1], min(strides), most, int(here.min()), 1 / together)


def _ranks(axes: _Axes) -> NDArray[np.int64]:
    """Return the ranks that some mesh axes reach from rank 0."""
    ranks = np.zeros(1, dtype=np.int64)
    for size, stride in axes:
        ranks = (ranks[:, None] + stride * np.arange(size)).ravel()
    return ranks
