"""Restrictions of a search's space and budget: with fewer plans, the same effort covers more of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitpar.planner.search.space import Space

FEWER: tuple[dict[str, tuple[str, ...]], ...] = (
    {"flags": ()},
    {"flags": ("ckpt",)},
    {"roles": ("pp", "dp")},
    {"roles": ("pp", "dp", "fsdp")},
    {"schedules": ("1f1b",)},
)
"""Restrictions of the space for additional searches: with fewer strategies, the same effort covers more of the plans.
"""


def smaller_budgets(budget: float) -> list[float]:
    """Return budgets from about an eighth of `budget` up to just below it, in bytes.

    They are powers of 2 ** 0.5, so that searches with slightly different budgets use the same ones.
    """
    if not 1 < budget < math.inf:
        return []
    last = math.ceil(2 * math.log2(budget)) - 1
    return [2 ** (step / 2) for step in range(last - 5, last + 1)]


def part_of(space: Space, fewer: Mapping[str, tuple[str, ...]]) -> Space:
    """Return a copy of `space` whose fields named in `fewer` keep only the values listed there."""
    kept: dict[str, Any] = {
        name: tuple(one for one in getattr(space, name) if one in some) for name, some in fewer.items()
    }
    return replace(space, **kept)
