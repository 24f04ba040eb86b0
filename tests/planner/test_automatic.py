"""`vitpar.search` from Python, the recipe that trains a plan it found, and what would save time."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import vitpar
from vitpar.errors import PlannerError, UserError
from vitpar.models import model_config
from vitpar.planner.automatic import make_search
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, plan_title, price
from vitpar.planner.search.gains import PURPOSES, Gain, gains, shares
from vitpar.planner.sources import estimated_costs, profiled_costs
from vitpar.recipe import read_recipe
from vitpar.strategy import Plan, parse, validate

SMALL = vitpar.model_config("vit_small_patch16_224", num_classes=10)


def test_found_plans_are_listed_with_their_speed() -> None:
    found = vitpar.search(SMALL, cluster="4xH100", batch_size=64, memory="8GB", seconds=2)
    best = found.plans[0]
    assert best.plan.world_size == 4 and best.batch_size == 64 and best.memory_bytes <= 8e9
    lines, plan = repr(found).splitlines(), plan_title(best.plan)
    assert lines[0] == repr(best) and len(lines) == len(found.plans) and len(lines[0]) < 120
    assert lines[0].startswith(f"Price({plan}: {best.images_per_second:,.0f} samples/s in batches of 64, ")
    assert f"<td>{plan}</td>" in found._repr_html_() and found._repr_html_().count("<tr>") == 1 + len(lines)


def test_search_respects_its_options() -> None:
    found = vitpar.search(
        "vit_small_patch16_224",
        **{"cluster": "8xH100", "ranks": 4, "batch_size": (32, 64), "precision": "fp32", "compiled": False},
        **{"memory": 6e9, "microbatches": 4, "roles": ("pp", "dp"), "without": ("gpipe", "ckpt"), "seconds": 2},
    )
    for one in found.plans:
        assert one.plan.world_size == 4 and one.plan.microbatches == 4 and one.batch_size in (32, 64)
        assert {axis.role for strategy in one.plan.distinct for axis in strategy.axes} <= {"dp"}
        assert one.plan.schedule != "gpipe" and not any(strategy.checkpoint == "full" for strategy in one.plan.distinct)


REFUSED: list[tuple[dict, str]] = [
    ({"memory": "1MB", "roles": ("dp",)}, r"^no plan fits into 1 MB per rank \('.*' needs .* MB\): allow more memory"),
    ({"microbatches": 7}, r"^a batch of 64 samples is not divisible by 7 micro-batches"),
    ({"roles": ("pp", "xp")}, r"^unknown role 'xp'"),
    ({"without": ("turbo",)}, r"^unknown flag 'turbo'"),
    ({"ranks": 16}, r"^16 ranks do not fit the 4 devices"),
    ({"batch_size": 0}, r"^batch_size is 0"),
    ({"hardware": "x.json"}, r"^both a cluster and profiles are given"),
    ({"memory": "8 apples"}, r"^memory 8 apples is not a size"),
    ({"cluster": None, "hardware": "gone.json"}, r"gone\.json"),
]


def test_invalid_search_options_are_refused() -> None:
    for options, sentence in REFUSED:
        with pytest.raises(UserError, match=sentence):
            vitpar.search(SMALL, **({"cluster": "4xH100", "batch_size": 64, "seconds": 1} | options))


def test_profiles_are_read_from_files(tmp_path: Path) -> None:
    costs = estimated_costs(SMALL, "2xH100", "fp32", compiled=False)
    files = tmp_path / "hardware.json", tmp_path / "model.json"
    costs.hardware.save(files[0])
    costs.model.save(files[1])
    options = {"batch_size": 32, "seconds": 1.0, "memory": "8GB"}
    read = vitpar.search(SMALL, hardware=files[0], model_profile=str(files[1]), precision="fp32", **options)
    named = vitpar.search(SMALL, cluster="2xH100", precision="fp32", compiled=False, **options)
    assert [str(one.plan) for one in read.plans[:3]] == [str(one.plan) for one in named.plans[:3]]
    assert read.plans[0].seconds == pytest.approx(named.plans[0].seconds)
    with pytest.raises(PlannerError, match="was measured with precision fp32 but the recipe has bf16"):
        vitpar.search(SMALL, hardware=files[0], model_profile=files[1], precision="bf16", **options)


def test_profile_with_other_layers_in_float8_is_refused(tmp_path: Path) -> None:
    costs = estimated_costs(SMALL, "2xH100", "fp8", fp8_min_features=0)
    files = tmp_path / "hardware.json", tmp_path / "model.json"
    costs.hardware.save(files[0])
    costs.model.save(files[1])
    given = {"data.path": "x", "train.steps": 1, "train.precision": "fp8", "train.compile": True}
    every = read_recipe(None, given | {"train.fp8_min_features": 0})
    assert profiled_costs(every, lambda _: SMALL, *files).model == costs.model
    with pytest.raises(PlannerError, match=r"fp8_min_features 0 but the recipe has 576: profile the model again"):
        profiled_costs(read_recipe(None, given), lambda _: SMALL, *files)


PLANS = (
    parse("dp4"),
    replace(parse("pp2xtp2+sp"), microbatches=4, split=(7, 5)),
    replace(parse("pp2: embed=fsdp2, 0-5=tp2, *=fsdp2+ckpt"), microbatches=2, schedule="gpipe"),
    replace(parse("pp2xdp2"), microbatches=8, schedule="interleaved1f1b", virtual_stages=2),
)


@pytest.mark.parametrize("asked", PLANS, ids=str)
def test_recipe_under_a_plan_reproduces_the_plan(asked: Plan) -> None:
    named = {"data.path": "x", "train.steps": 1, "train.batch_size": 32}
    recipe = read_recipe(None, named | {"communication.bucket_cap_mb": 5})
    plan = validate(asked, SMALL, 32)
    under = recipe.under(plan)
    assert under.plan(SMALL) == plan
    assert read_recipe(None, named).under(plan).parallel == under.parallel


FULL = model_config("vit_small_patch16_224")
COMPUTING = "devices and hosts that compute twice as fast"


def costs(cluster: str) -> LayerCosts:
    return estimated_costs(FULL, cluster, "bf16")


def priced(plan: str, here: LayerCosts, batch_size: int = 256) -> Price:
    return price(validate(parse(plan), FULL, batch_size), here, batch_size)


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
    fitting = by_change(gains((plan,), here, plan.memory_bytes, 2))
    assert COMPUTING in fitting
    assert all(gain.price.memory_bytes <= plan.memory_bytes for gain in fitting.values())
