"""Where a rank stands in a uniform plan's mesh. The leftmost axis varies slowest, as in DeviceMesh."""

from __future__ import annotations

from vitpar.strategy.plan import ROLES, Plan, Role


def coordinates(plan: Plan, rank: int) -> dict[Role, int]:
    """The rank's index along every role, 0 for the roles that the plan does not name."""
    assert 0 <= rank < plan.world_size, f"rank {rank} is outside '{plan}'"
    place: dict[Role, int] = dict.fromkeys(ROLES, 0)
    for axis in reversed(plan.axes):
        rank, place[axis.role] = divmod(rank, axis.size)
    return place


def rank_grid(plan: Plan) -> list[dict[Role, int]]:
    """The coordinates of every rank, in rank order."""
    return [coordinates(plan, rank) for rank in range(plan.world_size)]


def data_index(plan: Plan, rank: int) -> int:
    """Which of the batch's data-parallel parts, 0 to dp × fsdp - 1, the rank computes."""
    place = coordinates(plan, rank)
    return place["dp"] * plan.strategy.degree("fsdp") + place["fsdp"]
