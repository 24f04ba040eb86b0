"""Where a rank stands: its place on the pp axis, its number within its stage, its index along a layer's axes.

The leftmost axis varies slowest, as in DeviceMesh. In a layerwise plan pp is the outermost axis.
"""

from __future__ import annotations

import math

from vitpar.strategy.layer import ROLES, Role
from vitpar.strategy.plan import Plan


def place_of_rank(plan: Plan, rank: int) -> tuple[int, int]:
    """(index along pp, number within the stage) of a rank of the world."""
    assert 0 <= rank < plan.world_size, f"rank {rank} is outside '{plan}'"
    inner = _inner_size(plan)
    outer, low = divmod(rank, inner)
    high, pp = divmod(outer, plan.pipeline_degree)
    return pp, high * inner + low


def rank_of_place(plan: Plan, pp: int, stage_rank: int) -> int:
    """The rank of the world at `place_of_rank`'s (index along pp, number within the stage)."""
    inner = _inner_size(plan)
    high, low = divmod(stage_rank, inner)
    return (high * plan.pipeline_degree + pp) * inner + low


def coordinates(plan: Plan, rank: int) -> dict[Role, int]:
    """The rank's index along every role of a uniform plan, 0 for the roles that the plan does not name."""
    assert 0 <= rank < plan.world_size, f"rank {rank} is outside '{plan}'"
    place: dict[Role, int] = dict.fromkeys(ROLES, 0)
    for axis in reversed(plan.axes):
        rank, place[axis.role] = divmod(rank, axis.size)
    return place


def rank_grid(plan: Plan) -> list[dict[Role, int]]:
    """The coordinates of every rank of a uniform plan, in rank order."""
    return [coordinates(plan, rank) for rank in range(plan.world_size)]


def _inner_size(plan: Plan) -> int:
    """Ranks of a stage that vary faster than pp."""
    if not plan.is_uniform or plan.pp == 1:
        return plan.stage_size
    return math.prod(axis.size for axis in plan.strategy.axes[plan.pp_index :])
