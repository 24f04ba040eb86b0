"""Limits of a plan, and what a better machine or a larger batch would save."""

from itertools import pairwise

import pytest

from vitpar.models import model_config
from vitpar.planner.automatic import make_search
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.search.gains import PURPOSES, Gain, gains, shares
from vitpar.planner.sources import estimated_costs
from vitpar.strategy import parse, validate

CONFIG = model_config("vit_small_patch16_224")
COMPUTING = "devices and hosts that compute twice as fast"


def costs(cluster: str) -> LayerCosts:
    return estimated_costs(CONFIG, cluster, "bf16")


def priced(plan: str, here: LayerCosts, batch_size: int = 256) -> Price:
    return price(validate(parse(plan), CONFIG, batch_size), here, batch_size)


def by_change(found: tuple[Gain, ...]) -> dict[str, Gain]:
    assert all(before.time <= after.time for before, after in pairwise(found))
    return {gain.change: gain for gain in found}


def test_shares_cover_the_step() -> None:
    here = costs("2xA100")
    found = priced("tp2", here)
    parts = shares(found)
    assert sum(parts.values()) == pytest.approx(1)
    assert {part for parts in PURPOSES.values() for part in parts} >= {*found.time}
    assert parts["tensor-parallel communication"] == pytest.approx(found.time["tensor"] / found.seconds)
    assert list(parts) == sorted(parts, key=lambda name: -parts[name])


def test_one_device_that_computes_twice_as_fast_needs_half_the_time() -> None:
    here = costs("1xA100")
    found = by_change(gains((priced("dp1", here),), here, 80e9, 2))
    assert found[COMPUTING].time == pytest.approx(-0.5, abs=1e-3)
    assert not any("links" in change for change in found), "a single device has no links"


def test_links_twice_as_fast_save_half_of_their_time() -> None:
    here = costs("2xA100")
    plan = priced("tp2", here)
    (gain,) = (gain for gain in gains((plan,), here, 80e9, 2) if gain.change == "links twice as fast")
    sent = plan.time["tensor"] + plan.time["redistribution"] + plan.time["gradients"]
    assert gain.time == pytest.approx(-sent / 2 / plan.seconds, rel=0.05)


def test_links_within_and_between_nodes_are_separate() -> None:
    here = costs("2x2xA100")
    found = by_change(gains((priced("dp2xtp2", here),), here, 80e9, 2))
    within, between = (found[f"links {where} nodes twice as fast"].time for where in ("within", "between"))
    assert within < 0 and between < 0 and within != between


def test_memory_helps_if_the_plan_is_short_of_it() -> None:
    here = costs("4xA100")
    searching = make_search(here, (1024,), 2, roles=("dp",), microbatches=(1,), seconds=1)
    tight = searching.best(4e9).plans
    assert any(strategy.checkpoint for strategy in tight[0].plan.distinct)
    found = by_change(gains((*tight, *searching.best(6e9).plans), here, 4e9, 2))
    more = found["50 % more memory"]
    assert more.time < -0.05 and 4e9 < more.price.memory_bytes <= 6e9
    loose = by_change(gains(searching.best(80e9).plans, here, 80e9, 2))
    assert loose["50 % more memory"].time == pytest.approx(0, abs=1e-3)


def test_twice_the_batch_is_priced_per_image() -> None:
    here = costs("4xA100")
    plan = priced("dp4", here, 64)
    (gain,) = (gain for gain in gains((plan,), here, 80e9, 2) if "batch" in gain.change)
    assert gain.change == "twice the batch, 128 samples" and gain.price.batch_size == 128
    assert gain.time == pytest.approx(gain.price.seconds / 128 / (plan.seconds / 64) - 1)
    assert -0.5 < gain.time < 0


def test_changes_that_do_not_fit_are_left_out() -> None:
    here = costs("4xA100")
    plan = priced("dp4", here, 64)
    found = by_change(gains((plan,), here, plan.memory_bytes, 2))
    assert COMPUTING in found
    assert all(gain.price.memory_bytes <= plan.memory_bytes for gain in found.values())
