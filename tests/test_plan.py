"""Plan objects: open degrees, refused fields, and the place of every rank in the mesh."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from vitpar.errors import StrategyError
from vitpar.strategy import Axis, Plan, Strategy, coordinates, data_index, parse, rank_grid


@pytest.mark.parametrize(
    ("text", "world_size", "resolved"),
    [
        ("tp2xdp", 8, "tp2xdp4"),
        ("tp2xdp", 2, "tp2"),
        ("dpxpp2xtp2", 4, "pp2xtp2"),
        ("dpxpp2xtp2", 8, "dp2xpp2xtp2"),
        ("tp2xppxdp2", 16, "tp2xpp4xdp2"),
        ("tp2xppxdp2", 4, "tp2xdp2"),
        ("dp", 1, "dp1"),
        ("pp", 1, "dp1"),
        ("dp2xtp2", 4, "dp2xtp2"),
        ("fsdp+ckpt", 4, "fsdp4+ckpt"),
    ],
)
def test_open_degree_takes_the_rest(text: str, world_size: int, resolved: str) -> None:
    plan = parse(text).resolve(world_size)
    assert plan == parse(resolved)
    assert plan.world_size == world_size


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        (
            "pp2xdp2",
            8,
            "'pp2xdp2' needs 4 ranks but the world has 8: start 4, or leave one degree open as in 'pp2xdp'",
        ),
        ("dp1", 2, "'dp1' needs 1 rank but the world has 2: start 1, or leave one degree open as in 'dp'"),
        (
            "tp4xdp",
            6,
            "the degrees given in 'tp4xdp' multiply to 4, which does not divide 6 ranks: "
            "choose degrees whose product divides 6",
        ),
        (
            "tp4xdp",
            2,
            "the degrees given in 'tp4xdp' multiply to 4, which does not divide 2 ranks: "
            "choose degrees whose product divides 2",
        ),
    ],
)
def test_degrees_that_do_not_fit_the_world(text: str, world_size: int, message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text).resolve(world_size)
    assert str(caught.value) == message


def test_open_degree_has_no_size() -> None:
    with pytest.raises(StrategyError, match=r"^the degree of 'dp' is open: give it a number"):
        _ = parse("tp2xdp").world_size


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Axis("fsd", 2), "unknown role 'fsd': roles are pp, dp, fsdp, tp (did you mean 'fsdp'?)"),  # type: ignore[arg-type]
        (lambda: Axis("dp", 0), "the degree of 'dp' is 0: use 1 or more"),
        (
            lambda: Strategy((Axis("pp", 2),)),
            "'pp2' stands in a layer's strategy: give the pipeline degree as the plan's pp",
        ),
        (lambda: Strategy((Axis("tp", 1),)), "'tp1' stands in a strategy: leave out axes of degree 1"),
        (
            lambda: Strategy((Axis("tp", 2), Axis("tp", 4))),
            "role 'tp' stands twice in a strategy: give each role once",
        ),
        (
            lambda: Strategy(checkpoint="ful"),
            "unknown checkpoint policy 'ful': policies are full (did you mean 'full'?)",
        ),
        (
            lambda: Strategy(checkpoint="selective"),
            "vitpar does not run +ckpt.selective yet: use +ckpt, which recomputes whole blocks",
        ),
        (
            lambda: Plan(layers=(("0-3", Strategy()), ("*", Strategy()))),
            "vitpar does not run layerwise plans yet (layers 0-3, *): give all layers one strategy, as in pp2xfsdp4",
        ),
        (lambda: Plan(pp=0), "the degree of 'pp' is 0: use 1 or more"),
        (lambda: Plan(pp_index=1), "pp_index is 1 but pp has 0 axes to stand behind: use 0 to 0"),
        (lambda: Plan(virtual_stages=0), "virtual_stages is 0: use 1 or more"),
        (lambda: Plan(microbatches=0), "microbatches is 0: use 1 or more"),
        (lambda: Plan(microbatch_size=-1), "microbatch_size is -1: use 1 or more"),
        (
            lambda: Plan(schedule="1f1bb"),
            "unknown schedule '1f1bb': schedules are gpipe, 1f1b, interleaved1f1b (did you mean '1f1b'?)",
        ),
        (
            lambda: Plan(split="evn"),
            "unknown split 'evn': use even, balanced or the blocks of each stage (did you mean 'even'?)",
        ),
    ],
)
def test_a_field_that_is_wrong_by_itself_is_refused(build, message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        build()
    assert str(caught.value) == message


def test_leftmost_axis_varies_slowest() -> None:
    place = {"pp": 0, "dp": 0, "fsdp": 0, "tp": 0}
    assert rank_grid(parse("pp2xtp2xdp2")) == [
        place | {"pp": pp, "tp": tp, "dp": dp} for pp in range(2) for tp in range(2) for dp in range(2)
    ]
    assert coordinates(parse("tp2xpp3"), 4) == place | {"tp": 1, "pp": 1}
    assert rank_grid(parse("dp1")) == [place]


@pytest.mark.parametrize("text", ["dp2xfsdp3xtp2", "fsdp3xtp2xdp2xpp2", "tp2xfsdp3", "pp2xtp2", "dp1"])
def test_every_data_part_is_computed_by_equally_many_ranks(text: str) -> None:
    plan = parse(text)
    parts = [data_index(plan, rank) for rank in range(plan.world_size)]
    others = plan.world_size // plan.strategy.data_parallel
    assert sorted(parts) == [part for part in range(plan.strategy.data_parallel) for _ in range(others)]


def test_data_parts_follow_dp_then_fsdp() -> None:
    assert [data_index(parse("dp2xfsdp3"), rank) for rank in range(6)] == [0, 1, 2, 3, 4, 5]
    assert [data_index(parse("fsdp3xdp2"), rank) for rank in range(6)] == [0, 3, 1, 4, 2, 5]
    assert [data_index(parse("dp2xtp2"), rank) for rank in range(4)] == [0, 0, 1, 1]


def test_num_stages_counts_virtual_ones() -> None:
    plan = replace(parse("dp2xpp3xtp2"), virtual_stages=2)
    assert (plan.pipeline_degree, plan.num_stages, plan.strategy.size) == (3, 6, 4)
    assert plan.world_size == math.prod(axis.size for axis in plan.axes) == 12


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, vitpar.strategy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
