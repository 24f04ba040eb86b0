"""Prices of a training with a teacher: its parameters on a rank, and its forward before every step."""

import pytest

from vitpar import model_config, parse, validate
from vitpar.errors import PlannerError
from vitpar.models import ModelConfig
from vitpar.planner.automatic import make_search, run_search
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.cost.records import PlannedTeacher
from vitpar.planner.report.timeline import timeline
from vitpar.planner.sources import estimated_costs
from vitpar.recipe.sections.training import DistillSection

BATCH = 256
SMALL, LARGE = (model_config(f"vit_{size}_patch16_224") for size in ("small", "large"))


def costs_of(teacher: ModelConfig | None = None, plan: str = "dp") -> LayerCosts:
    planned = None if teacher is None else PlannedTeacher(teacher, DistillSection(teacher="there", plan=plan))
    return estimated_costs(SMALL, "8xA100", "bf16", teacher=planned)


def priced(mesh: str, costs: LayerCosts) -> Price:
    return price(validate(parse(mesh), SMALL, BATCH), costs, BATCH)


@pytest.mark.parametrize("mesh", ["dp8", "pp2xdp4"])
def test_teacher_like_the_model_takes_as_long_as_its_forward(mesh: str) -> None:
    alone, taught = priced(mesh, costs_of()), priced(mesh, costs_of(SMALL))
    added = taught.seconds - alone.seconds
    assert added == pytest.approx(priced("dp8", costs_of()).time["forward"], rel=1e-6)
    assert taught.time["teacher"] == added
    spans = timeline(taught, costs_of(SMALL))
    assert [span.what for span in spans if span.start < added] == ["teacher"] * (2 if "pp" in mesh else 1)
    longer = priced(mesh, costs_of(LARGE)).time["teacher"]
    assert longer / added == pytest.approx(LARGE.flops / SMALL.flops)


@pytest.mark.parametrize(("plan", "parts"), [("dp", 1), ("fsdp8", 8), ("fsdp2xdp4", 2), ("tp", 8)])
def test_memory_grows_by_the_parameters_of_the_teacher_on_a_rank(plan: str, parts: int) -> None:
    alone, taught = priced("dp8", costs_of()), priced("dp8", costs_of(LARGE, plan))
    (memory,) = taught.memory
    assert taught.memory_bytes - alone.memory_bytes == pytest.approx(memory.teacher)
    assert memory.teacher == pytest.approx(4 * LARGE.parameters / parts, rel=0.03)


def test_search_leaves_room_for_the_teacher() -> None:
    room = 4 * LARGE.parameters
    alone, taught = (make_search(costs, (BATCH,), 2) for costs in (costs_of(), costs_of(LARGE)))
    limit = run_search(alone, 80e9).plans[0].memory_bytes
    best = [run_search(search, limit + more).plans[0] for search, more in ((alone, 0), (taught, room))]
    assert best[0].plan == best[1].plan
    with pytest.raises(PlannerError, match="no plan fits"):
        run_search(taught, room)


def test_search_gives_ranks_whole_groups_of_images() -> None:
    costs = estimated_costs(SMALL, "8xA100", "bf16", teacher=PlannedTeacher(SMALL, None, group=16))
    plans = run_search(make_search(costs, (64,), 2), 80e9).plans
    assert {64 // (plan.plan.data_parallel * (plan.plan.microbatches or 1)) for plan in plans} <= {16, 32, 64}
