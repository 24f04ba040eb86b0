"""Which plan a recipe runs under: its own, or the first of those it names otherwise that fits the ranks there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitpar.errors import StrategyError, shown
from vitpar.strategy import Plan


@dataclass(frozen=True)
class Chosen:
    """plan: the one that fits. because: why it is not the first, one sentence; None where it is."""

    plan: Plan
    because: str | None = None


def first_that_fits(wanted: Sequence[Plan], fit: Callable[[Plan], Plan]) -> Chosen:
    """The first of `wanted` that `fit` does not refuse, as it returns it.

    Raises StrategyError: that of `fit` where one plan is wanted, else one with the reasons of all.
    """
    refusals: list[str] = []
    for plan in wanted:
        try:
            fitting = fit(plan)
        except StrategyError as error:
            if len(wanted) == 1:
                raise
            refusals.append(str(error))
            continue
        because = f"the plan is '{shown(fitting)}', since {'; '.join(refusals)}" if refusals else None
        return Chosen(fitting, because)
    reasons = "; ".join(f"{shown(plan)}: {why}" for plan, why in zip(wanted, refusals, strict=True))
    raise StrategyError(f"neither parallel.mesh nor any of parallel.otherwise fits: {reasons}")
