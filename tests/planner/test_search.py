"""The search compared with exhaustive enumeration, on small models and clusters drawn by hypothesis."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.searches import EVERYTHING, assert_as_fast, assert_bounds_hold, every_plan
from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.profile.cluster import Cluster, HostRates, Network, Wire
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.profile.profiles import Overlap
from vitpar.planner.search.best import Search
from vitpar.planner.search.reasons import reasons
from vitpar.planner.search.space import Space
from vitpar.strategy import Plan, parse, validate
from vitpar.strategy.plan_json import plan_from_json, plan_to_json
from vitpar.strategy.support import refuse_clashes

SMALL = {"patch_size": 8, "image_size": 32, "num_heads": 4, "num_classes": 10}


def cluster(
    nodes: int = 1, devices: int = 4, wire: float = 1e10, latency: float = 1e-5, overlap: Overlap | None = None
) -> Cluster:
    return Cluster(
        name="drawn",
        nodes=nodes,
        devices_per_node=devices,
        device_name="drawn",
        memory_bytes=10**9,
        matmul={"float32": 1e12},
        memory_bandwidth=1e11,
        sustained=1.0,
        intra=Wire(bandwidth=wire, latency=latency),
        inter=Network(bandwidth=wire / 4, latency=4 * latency),
        overlap=overlap,
        host=HostRates(bandwidth=wire / 2, memory_bandwidth=1e10),
    )


def costs_of(drawn: Cluster, depth: int, width: int, cpu: bool = False) -> LayerCosts:
    """Return the costs of a drawn cluster, of GPUs or of ranks on CPUs."""
    config = model_config("vit_custom", embed_dim=width, depth=depth, **SMALL)
    hardware = drawn.hardware()
    model = estimate_model(config, "fp32", hardware, tensors(config, hardware.ranks))
    if cpu:
        hardware = hardware.model_copy(update={"device": "cpu", "host": None})
        model = model.model_copy(update={"device": "cpu"})
    return LayerCosts(config, hardware, model)


ROLES = (("dp", "fsdp"), ("dp", "tp"), ("fsdp", "tp"), ("pp", "dp"), ("pp", "fsdp"), ("pp", "dp", "fsdp"), ("pp", "tp"))


@settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    roles=st.sampled_from(ROLES),
    flag=st.sampled_from(("sp", "2d", "zero1", "zero2", "ckpt", "ckpt.selective", "offload")),
    devices=st.sampled_from((1, 2, 4)),
    nodes=st.sampled_from((1, 2)),
    depth=st.sampled_from((2, 3)),
    width=st.sampled_from((64, 256)),
    batch_size=st.sampled_from((2, 4, 6)),
    wire=st.floats(1e8, 1e11),
    latency=st.sampled_from((0.0, 1e-5, 1e-3)),
    slower=st.sampled_from((None, 1.0, 1.3, 3.0)),
    cpu=st.booleans(),
    share=st.floats(0.0, 1.0),
)
def test_search_is_as_fast_as_exhaustive_enumeration(
    roles: tuple[str, ...],
    flag: str,
    devices: int,
    nodes: int,
    depth: int,
    width: int,
    batch_size: int,
    wire: float,
    latency: float,
    slower: float | None,
    cpu: bool,
    share: float,
) -> None:
    """No plan of the space that fits the budget is more than 3 % faster, and none is faster than the bound.

    share: quantile of all plans' memory that is the budget
    """
    overlap = None if slower is None else Overlap(compute=slower, communication=slower)
    costs = costs_of(cluster(nodes, devices, wire, latency, overlap), depth, width, cpu)
    schedules = ("1f1b", "interleaved1f1b") if flag in ("ckpt", "zero2", "offload") else ("gpipe", "zbvzerobubble")
    space = Space(costs.config, nodes * devices, (batch_size,), roles=roles, flags=(flag,), schedules=schedules)
    every = [price(plan, costs, batch_size) for plan in every_plan(space, batch_size, not cpu)]
    if not every:
        return
    sizes = sorted(found.memory_bytes for found in every)
    budget = sizes[int(share * (len(sizes) - 1))]
    best = max((found for found in every if found.memory_bytes <= budget), key=lambda p: p.images_per_second)
    result = Search(space, costs, effort=EVERYTHING).best(budget)
    if not result.plans:
        # Only a uniform plan that fits is found for certain.
        assert not any(one.memory_bytes <= budget for one in every if one.plan.is_uniform and one.plan.split == "even")
        return
    assert_as_fast(result.plans[0], best)
    assert result.bound >= best.images_per_second * (1 - 1e-9)
    assert result.plans[0].memory_bytes <= budget


@pytest.mark.parametrize(
    ("flag", "cpu", "slower", "width"),  # activations dominate at 64, parameters and gradients at 1024
    [
        ("zero1", False, 1.3, 64),
        ("zero1", True, 3.0, 1024),
        ("zero2", False, 3.0, 1024),
        ("zero2", True, 1.3, 64),
        ("ckpt", True, 1.3, 1024),
        ("ckpt", False, 3.0, 64),
    ],
)
def test_bounds_of_uniform_plans_do_not_exceed_their_prices(flag: str, cpu: bool, slower: float, width: int) -> None:
    """A bound that exceeds a price could hide the best plan."""
    overlap = Overlap(compute=slower, communication=slower)
    costs = costs_of(cluster(2, 2, 1e9, 1e-5, overlap), 4, width, cpu)
    space = Space(costs.config, 4, (32,), flags=(flag,), schedules=("1f1b",))
    assert_bounds_hold(Search(space, costs), 32)


def test_found_plans_are_accepted_by_the_runtime() -> None:
    """Every found plan passes validation and survives a JSON round trip."""
    costs = costs_of(cluster(2, 2), 6, 64)
    space = Space(costs.config, 4, (16, 32))
    search = Search(space, costs)
    largest = search.best(float("inf")).plans[0]
    found: set[Plan] = set()
    for plan in (*search.frontier(largest), *search.best(largest.memory_bytes / 3).plans):
        found.add(plan.plan)
        assert validate(plan.plan, costs.config, plan.batch_size) == plan.plan
        refuse_clashes(plan.plan, "fp32", False)
        assert plan_from_json(plan_to_json(plan.plan)) == plan.plan
    assert len(found) > 3


def test_smaller_memory_budget_is_never_faster() -> None:
    costs = costs_of(cluster(1, 4), 6, 128)
    search = Search(Space(costs.config, 4, (16,)), costs)
    largest = search.best(float("inf")).plans[0]
    speeds = [point.images_per_second for point in search.frontier(largest)]
    assert speeds == sorted(speeds, reverse=True)
    assert not search.best(1000.0).plans


def step(costs: LayerCosts, plan: str, batch_size: int, **fields: object) -> Price:
    return price(validate(replace(parse(plan), **fields), costs.config, batch_size), costs, batch_size)


MESHES = ("dp4", "fsdp4", "dp4+zero1", "tp4", "tp4+sp", "tp4+2d", "tp2xdp2", "pp2xdp2", "pp4", "fsdp4+ckpt", "pp2xtp2")


@pytest.mark.parametrize("mesh", MESHES)
def test_larger_models_and_batches_never_cost_less(mesh: str) -> None:
    """More blocks, more images, wider blocks or slower links never take less time.

    The first three also need more memory.
    """
    drawn = cluster(1, 4, overlap=Overlap(compute=1.2, communication=1.3))
    base = step(costs_of(drawn, 4, 64), mesh, 16)
    wider = step(costs_of(drawn, 4, 128), mesh, 16)
    deeper = step(costs_of(drawn, 8, 64), mesh, 16)
    more = step(costs_of(drawn, 4, 64), mesh, 32, microbatches=base.plan.microbatches)
    for other in (wider, deeper, more):
        assert other.seconds >= base.seconds
        assert other.memory_bytes > base.memory_bytes
    assert deeper.seconds > base.seconds
    slower = step(costs_of(cluster(1, 4, wire=1e9, overlap=drawn.overlap), 4, 64), mesh, 16)
    assert slower.seconds >= base.seconds


def test_time_breakdown_adds_up_to_the_step() -> None:
    costs, zero_bubble = costs_of(cluster(1, 4), 4, 64), {"schedule": "zbvzerobubble", "virtual_stages": 2}
    found = [step(costs, mesh, 16) for mesh in (*MESHES, "pp2xfsdp2")]
    found += [step(costs, mesh, 16, **zero_bubble) for mesh in ("pp2xdp2", "pp2xtp2", "pp2xfsdp2")]
    for one in found:
        assert sum(one.time.values()) == pytest.approx(one.seconds), str(one.plan)
        assert all(part >= -1e-12 * one.seconds for part in one.time.values()), (str(one.plan), one.time)


def test_listed_plans_are_sorted_and_include_the_obvious_ones() -> None:
    costs = costs_of(cluster(1, 4), 4, 64)
    narrow = Search(Space(costs.config, 4, (16,), roles=("tp",)), costs)
    why = {one.plan: one.why for one in reasons(narrow, narrow.best(float("inf")).plans[0], float("inf"))}
    assert "more samples/s, but outside the searched space" in why["dp4"]
    search = Search(Space(costs.config, 4, (16,)), costs)
    result = search.best(float("inf"))
    obvious = [reason.price for reason in reasons(search, result.plans[0], float("inf")) if reason.price]
    listed = result.with_alternatives(obvious).plans
    assert listed[0] == result.plans[0]
    assert {price.plan for price in obvious} <= {price.plan for price in listed}
    speeds = [price.images_per_second for price in listed[1:]]
    assert speeds == sorted(speeds, reverse=True)
