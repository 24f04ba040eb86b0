"""The search on models with several kinds of blocks, compared with exhaustive enumeration and with random plans."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

import search_guarantees
from helpers.searches import EVERYTHING, assert_as_fast, runs, splits
from vitpar.errors import StrategyError
from vitpar.models import model_config
from vitpar.planner.automatic import search
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


def every_plan(space: Space, batch_size: int) -> Iterator[Plan]:
    """Yield every plan of the space by plain loops: validation decides which strategies fit."""
    config = space.config
    for pipeline in space.pipelines():
        size = space.ranks // pipeline.pipeline_degree
        strategies = [s for s in space.strategies(size) if space.allows(pipeline, s)]
        assert pipeline.virtual_stages == 1
        for split in splits(config.num_blocks, pipeline.num_stages):
            ends = [sum(split[:n]) for n in range(len(split) + 1)]
            sections = []
            for start, stop in pairwise(ends):
                for blocks in config.groups.values():
                    first, last = max(start, blocks.start), min(stop, blocks.stop)
                    if first < last:
                        sections.append(list(runs(first, last, strategies)))
            for choice in product(*sections):
                layers = tuple(group for run in choice for group in run)
                if len({strategy for _, strategy in layers}) == 1:
                    layers = (("*", layers[0][1]),)
                for microbatches in space.microbatches(pipeline, batch_size):
                    made = replace(pipeline, layers=layers, split=split if len(split) > 1 else "even")
                    try:
                        yield validate(replace(made, microbatches=microbatches), config, batch_size)
                    except StrategyError:
                        continue


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
def test_search_equals_exhaustive_enumeration(
    ranks: int, roles: tuple[str, ...], flags: tuple[str, ...], fields: dict, batch_size: int
) -> None:
    """The search reports an exact optimum, and no plan of the space that fits the budget is faster.

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
        found = result.plans[0]
        assert result.exact
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


@pytest.mark.parametrize("ranks", [4, 8])
def test_bounds_do_not_exceed_the_prices_of_random_plans(ranks: int) -> None:
    """An outline's bounds hold for plans with any mix of strategies and any split."""
    costs = estimated_costs(model_config("swin_tiny_patch4_window7_224"), "8xH100", "bf16", ranks=ranks)
    space, draw = Space(costs.config, ranks, (64,), precision="bf16", compiled=True), random.Random(ranks)
    pipelines = [pipeline for pipeline in space.pipelines() if pipeline.virtual_stages == 1]
    found: list[Price] = []
    while len(found) < 150:
        pipeline = draw.choice(pipelines)
        strategies = [s for s in space.strategies(ranks // pipeline.pipeline_degree) if space.allows(pipeline, s)]
        split = draw.choice(list(splits(12, pipeline.num_stages)))
        layers = tuple(
            (f"{first}-{first + 1}", draw.choice(strategies[:: draw.choice((1, 5))])) for first in range(0, 12, 2)
        )
        counts = space.microbatches(pipeline, 64)
        try:
            plan = replace(pipeline, layers=layers, split=split, microbatches=draw.choice(counts))
            refuse_clashes(plan, "bf16", True)
            found.append(price(validate(plan, costs.config, 64), costs, 64))
        except StrategyError:
            continue
    assert {found.plan.pipeline_degree for found in found} >= {1, 2, 4}
    _bounds_hold(Search(space, costs), found)


@pytest.mark.parametrize("memory", ["2GB", "4GB", "40GB"])
def test_search_is_never_slower_than_one_strategy_per_section(memory: str) -> None:
    """No obvious plan that fits is faster, be it of one strategy or of its counterpart where that does not fit."""
    result = search("swin_tiny_patch4_window7_224", cluster="8xH100", batch_size=256, memory=memory, precision="bf16")
    costs = estimated_costs(model_config("swin_tiny_patch4_window7_224"), "8xH100", "bf16")
    best = result.plans[0]
    for words in (
        "dp8", "fsdp8", "fsdp8+ckpt", "dp8+zero1", "dp8+zero2", "pp2xdp4", "pp4xdp2", "pp2xfsdp4", "pp2xfsdp4+ckpt",
        "pp1: stage1=dp8, *=dp4xtp2", "pp1: stage1=fsdp8, *=fsdp4xtp2+sp", "pp2: stage1=dp4, *=dp2xtp2",
    ):  # fmt: skip
        for microbatches in (1, 2, 4, 8):
            try:
                plan = validate(replace(parse(words), microbatches=microbatches), costs.config, 256)
            except StrategyError:
                assert microbatches < parse(words).pipeline_degree
                continue
            found = price(plan, costs, 256)
            if found.memory_bytes <= best.memory_bytes:
                assert found.images_per_second <= best.images_per_second * 1.001, words
            assert found.images_per_second <= result.bound or found.memory_bytes > best.memory_bytes
    assert len(result.plans) > 1 or result.gap < 0.001


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
        pytest.param(range(1, 6), marks=pytest.mark.slow),
        *(pytest.param(range(n, n + 10), marks=pytest.mark.soak) for n in range(0, 200, 10)),
    ],
    ids=lambda numbers: f"{numbers.start} to {numbers.stop - 1}",
)
def test_search_is_never_slower_than_a_uniform_plan_or_another_it_lists(numbers: range) -> None:
    for number in numbers:
        check(number)
