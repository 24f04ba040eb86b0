"""Guarantees of the plan search on random clusters, with its default effort (experiments/search_guarantees.py)."""

import pytest

import search_guarantees
from vitpar.planner.search.best import Search
from vitpar.planner.search.ranking import SearchEffort
from vitpar.planner.search.reasons import reasons


def check(number: int) -> None:
    """Search on the cluster of the seed `number` with three budgets, and compare with every plan that is listed."""
    drawn = search_guarantees.draw(number)
    needs, speeds = search_guarantees.priced(drawn)
    for budget in search_guarantees.budgets(needs):
        search = Search(drawn.space, drawn.costs)
        result = search.best(budget)
        assert result.plans, f"cluster {number}: a uniform plan fits into {budget:.0f} bytes, but none is found"
        best = result.plans[0]
        obvious = [reason.price for reason in reasons(search, best, budget) if reason.price]
        tie, simpler = search_guarantees.TOLERANCE, 1.01 * SearchEffort().simpler
        others = (
            ("the fastest uniform plan", tie, [s for s, need in zip(speeds, needs, strict=True) if need <= budget]),
            ("the next best", simpler, [one.images_per_second for one in result.plans]),
            ("the frontier", simpler, [one.images_per_second for one in search.frontier(best)]),
            ("why not", tie, [one.images_per_second for one in obvious if one.memory_bytes <= budget]),
        )
        for name, more, found in others:
            assert max(found, default=0) <= (1 + more) * best.images_per_second, f"cluster {number}: {name}"


@pytest.mark.parametrize(
    "numbers",
    [
        range(1),
        pytest.param(range(1, 6), marks=pytest.mark.slow),
        *(pytest.param(range(n, n + 10), marks=pytest.mark.soak) for n in range(0, 200, 10)),
    ],
    ids=lambda numbers: f"{numbers.start} to {numbers.stop - 1}",
)
def test_search_is_never_slower_than_a_uniform_plan_or_another_it_lists(numbers: range) -> None:
    for number in numbers:
        check(number)
