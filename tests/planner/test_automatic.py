"""`vitpar.search` from Python, and the recipe that trains a plan it found."""

from dataclasses import replace
from pathlib import Path

import pytest

import vitpar
from vitpar.errors import PlannerError, UserError
from vitpar.planner.cost.price import plan_title
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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"memory": "1MB"}, r"^no plan fits into 1 MB per rank \('.*' needs .* MB\): allow more memory"),
        ({"microbatches": 7}, r"^a batch of 64 samples is not divisible by 7 micro-batches"),
        ({"roles": ("pp", "xp")}, r"^unknown role 'xp'"),
        ({"without": ("turbo",)}, r"^unknown flag 'turbo'"),
        ({"ranks": 16}, r"^16 ranks do not fit the 4 devices"),
        ({"batch_size": 0}, r"^batch_size is 0"),
        ({"hardware": "x.json"}, r"^both a cluster and profiles are given"),
        ({"memory": "8 apples"}, r"^memory 8 apples is not a size"),
        ({"cluster": None, "hardware": "gone.json"}, r"gone\.json"),
    ],
)
def test_invalid_search_options_are_refused(options: dict, sentence: str) -> None:
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
