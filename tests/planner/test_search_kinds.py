"""The search on models with several kinds of blocks, and on random clusters, compared with the best of all plans."""

import random
from dataclasses import replace

import numpy as np
import pytest

import search_guarantees
from helpers.searches import EVERYTHING, assert_as_fast, every_plan, splits
from vitpar.errors import StrategyError
from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.search.best import Search
from vitpar.planner.search.bounds import PlanOutline
from vitpar.planner.search.ranking import SearchEffort
from vitpar.planner.search.reasons import reasons
from vitpar.planner.search.relaxed import least_seconds
from vitpar.planner.search.space import Space
from vitpar.planner.search.tables import received_shares
from vitpar.planner.sources import estimated_costs
from vitpar.strategy import Plan, parse, token_layout, validate
from vitpar.strategy.layout import received_share
from vitpar.strategy.support import refuse_clashes

NANO = "swin_nano_patch2_window4_32"


def costs_of(ranks: int, **fields: object) -> LayerCosts:
    return estimated_costs(model_config(NANO, num_classes=10, **fields), "8xH100", "fp32", ranks=ranks)


CASES = (
    # heads 3, 6, 12: tp2 does not fit the first stage
    (2, ("dp", "tp"), (), {"embed_dim": 48, "num_heads": (3, 6, 12)}, 8),
    (2, ("fsdp", "tp"), ("ckpt",), {"embed_dim": 48, "num_heads": (3, 6, 12), "depths": (1, 2, 1)}, 4),
    (2, ("dp",), ("zero1", "ckpt"), {"depths": (1, 2, 1)}, 2),
    (4, ("dp", "tp"), (), {"depths": (2, 1, 1)}, 8),
    (2, ("pp", "dp"), ("ckpt",), {}, 8),
    (4, ("pp", "dp", "tp"), (), {"embed_dim": 48, "num_heads": (3, 6, 12), "depths": (1, 2, 1)}, 8),
    (4, ("pp", "tp", "dp"), (), {"embed_dim": 48, "num_heads": (3, 6, 12), "depths": (1, 1, 1)}, 4),
)


@pytest.mark.parametrize("ranks, roles, flags, fields, batch_size", CASES)
def test_search_is_as_fast_as_exhaustive_enumeration(
    ranks: int, roles: tuple[str, ...], flags: tuple[str, ...], fields: dict, batch_size: int
) -> None:
    """No plan of the space that fits the budget is more than 3 % faster, and none is faster than the bound.

    Budgets are quantiles of the memory of all plans.
    """
    costs = costs_of(ranks, **fields)
    space = Space(costs.config, ranks, (batch_size,), roles=roles, flags=flags, schedules=("1f1b",))
    every = [price(plan, costs, batch_size) for plan in every_plan(space, batch_size)]
    sizes = sorted(found.memory_bytes for found in every)
    for share in (0.0, 0.3, 1.0):
        budget = sizes[int(share * (len(sizes) - 1))]
        best = max((one for one in every if one.memory_bytes <= budget), key=lambda p: p.images_per_second)
        result = Search(space, costs, effort=EVERYTHING).best(budget)
        if not result.plans:
            # Only a uniform plan that fits is found for certain.
            uniform = [one for one in every if len(one.plan.distinct) == 1 and one.plan.split == "even"]
            assert not any(one.memory_bytes <= budget for one in uniform)
            continue
        found = result.plans[0]
        assert_as_fast(found, best)
        assert result.bound >= best.images_per_second * (1 - 1e-9)
        assert found.memory_bytes <= budget
        assert validate(found.plan, costs.config, batch_size) == found.plan
    _bounds_hold(Search(space, costs), every)


def _bounds_hold(searching: Search, prices: list[Price]) -> None:
    """Check the bounds of each outline against the fastest of `prices`, with just the memory that it needs."""
    fastest: dict[PlanOutline, Price] = {}
    for found in prices:
        outline = PlanOutline(
            replace(found.plan, layers=Plan().layers, split="even", microbatches=None),
            found.batch_size,
            found.plan.microbatches or 1,
        )
        if outline not in fastest or found.seconds < fastest[outline].seconds:
            fastest[outline] = found
    for outline, found in fastest.items():
        for budget in (found.memory_bytes, float("inf")):
            machine, options = searching.machine(outline, budget), searching.options(outline)
            sections = searching.space.sections
            for steps in (0, 40):
                assert least_seconds(outline, options, sections, machine, steps=steps) <= found.seconds * (1 + 1e-9)


def test_bounds_do_not_exceed_the_prices_of_random_plans() -> None:
    """An outline's bounds hold for plans with any mix of strategies and any split."""
    ranks = 8
    costs = estimated_costs(model_config("swin_tiny_patch4_window7_224"), "8xH100", "bf16", ranks=ranks)
    space, draw = Space(costs.config, ranks, (64,), precision="bf16", compiled=True), random.Random(ranks)
    pipelines = [pipeline for pipeline in space.pipelines() if pipeline.virtual_stages == 1]
    found: list[Price] = []
    while len(found) < 80:
        pipeline = draw.choice(pipelines)
        strategies = [s for s in space.strategies(ranks // pipeline.pipeline_degree) if space.allows(pipeline, s)]
        split = draw.choice(list(splits(12, pipeline.num_stages)))
        chosen = [draw.choice(strategies[:: draw.choice((1, 5))]) for _ in range(6)]
        layers = tuple((f"{2 * pair}-{2 * pair + 1}", strategy) for pair, strategy in enumerate(chosen))
        counts = space.microbatches(pipeline, 64)
        try:
            plan = replace(pipeline, layers=layers, split=split, microbatches=draw.choice(counts))
            refuse_clashes(plan, "bf16", True)
            found.append(price(validate(plan, costs.config, 64), costs, 64))
        except StrategyError:
            continue
    assert {found.plan.pipeline_degree for found in found} >= {1, 2, 4}
    _bounds_hold(Search(space, costs), found)


def test_shares_that_move_between_layouts_equal_those_of_the_runtime() -> None:
    words = ("dp8", "fsdp8", "tp8", "tp8+sp", "dp2xtp4+2d", "tp4xdp2", "tp8+3d", "tp8+2.5d", "dp4xtp2+sp", "tp2xdp4")
    layouts = [token_layout(parse(word).strategy) for word in words]
    expected = np.array([[received_share(source, target) for target in layouts] for source in layouts])
    assert received_shares(layouts) == pytest.approx(expected)


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
        pytest.param(range(1, 3), marks=pytest.mark.slow),
        *(pytest.param(range(n, n + 10), marks=pytest.mark.soak) for n in range(0, 200, 10)),
    ],
    ids=lambda numbers: f"{numbers.start} to {numbers.stop - 1}",
)
def test_search_is_never_slower_than_a_uniform_plan_or_another_it_lists(numbers: range) -> None:
    for number in numbers:
        check(number)
