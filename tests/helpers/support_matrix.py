"""Smallest plans with chosen features of the support matrix, and few of them that cover every pair of features."""

from collections.abc import Callable
from functools import cache
from itertools import combinations as pairs_of
from typing import Any

from vitpar import parse
from vitpar.strategy.support import combinations

STRUCTURE = ("data", "tensor", "schedule", "checkpoint")
"""Dimensions of the support matrix that decide the plan."""
_DATA = {"no dp": "", "dp": "dp2", "+zero1": "dp2", "+zero2": "dp2", "fsdp": "fsdp2", "dp x fsdp": "dp2xfsdp2"}
_TENSOR = {"no tp": "", "tp": "tp2", "+sp": "tp2", "+2d": "tp4", "+2.5d": "tp8", "+3d": "tp8"}


def smallest_plan(data: str, tensor: str, schedule: str, checkpoint: str) -> tuple[str, dict[str, Any]]:
    """Return the mesh and the other fields of the smallest plan that has these features."""
    axes = ["" if schedule == "no pp" else "pp2", _DATA[data], _TENSOR[tensor]]
    flags = [feature for feature in (tensor, data, checkpoint) if feature.startswith("+")]
    fields: dict[str, Any] = {"microbatches": 2}
    if schedule != "no pp":
        fields = {"schedule": schedule, "microbatches": 4}
    if schedule not in ("no pp", "gpipe", "1f1b"):
        fields["virtual_stages"] = 2
    mesh = "x".join(filter(None, axes)) or "dp1"
    return mesh + "".join(flags), fields


@cache
def ranks_of(choice: tuple[str, ...]) -> int:
    """Return the ranks of the smallest plan with these features; a precision is ignored."""
    return parse(smallest_plan(*choice[: len(STRUCTURE)])[0]).world_size


def covering(
    keep: Callable[[tuple[str, ...]], bool] = lambda choice: True, most: int | None = None
) -> list[tuple[str, ...]]:
    """Return few combinations of at most 8 ranks that contain every possible pair of features.

    The choice is greedy: the combination with the most new pairs comes next.

    keep: whether a combination may be chosen
    most: number of combinations after which to stop, although pairs are missing; None for no limit
    """
    choices = [choice for choice in combinations((*STRUCTURE, "precision")) if ranks_of(choice) <= 8 and keep(choice)]
    missing = {pair for choice in choices for pair in pairs_of(choice, 2)}
    found = []
    while missing and len(found) != most:
        best = max(choices, key=lambda choice: len(missing.intersection(pairs_of(choice, 2))))
        missing.difference_update(pairs_of(best, 2))
        found.append(best)
    return sorted(found, key=ranks_of)
