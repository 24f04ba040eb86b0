"""Plan objects: open degrees, refused fields, and the place of every rank in the mesh."""

import math
from dataclasses import replace

import pytest

import vitpar
from helpers.sentences import says
from vitpar import model_config, read_recipe
from vitpar.errors import StrategyError
from vitpar.strategy import Axis, Plan, Strategy, parse, place_of_rank, rank_of_place


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
        ("tp+2d", 9, "tp9+2d"),
        ("pp: 0-3=dp4, *=fsdp4", 8, "pp2: 0-3=dp4, *=fsdp4"),
        ("pp2: 0-3=tp2xdp, *=fsdp", 8, "pp2: 0-3=tp2xdp2, *=fsdp4"),
        ("pp2: 0-3=tp4xdp, *=fsdp4", 8, "pp2: 0-3=tp4, *=fsdp4"),
        ("pp2: 0-3=dp, *=dp4", 8, "pp2xdp4"),
    ],
)
def test_open_degree_takes_the_rest(text: str, world_size: int, resolved: str) -> None:
    plan = parse(text).resolve(world_size)
    assert plan == parse(resolved)
    assert plan.world_size == world_size


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ("pp2xdp2", 8, "'pp2xdp2' needs 4 ranks but the world has 8: start 4, or leave one degree open"),
        ("dp1", 2, "'dp1' needs 1 rank but the world has 2: start 1, or leave one degree open"),
        ("tp4xdp", 6, "the degrees given in 'tp4xdp' multiply to 4, which…: choose degrees whose product divides 6"),
        ("tp4xdp", 2, "the degrees given in 'tp4xdp' multiply to 4, which…: choose degrees whose product divides 2"),
        ("pp2: 0-3=tp3xdp, *=fsdp", 8, "the degrees given in 'pp2:…: choose degrees whose product divides 4"),
        ("pp2: 0-3=dp4, *=fsdp4", 4, "'pp2: 0-3=dp4, *=fsdp4' needs 8 ranks but…: start 8, or leave one degree open"),
    ],
)
def test_degrees_that_do_not_match_the_world_are_refused(text: str, world_size: int, message: str) -> None:
    with says(message):
        parse(text).resolve(world_size)


def test_open_degree_has_no_world_size() -> None:
    with pytest.raises(StrategyError, match=r"^the degree of 'dp' is open: give it a number"):
        _ = parse("tp2xdp").world_size


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Axis("fsd", 2), "unknown role 'fsd': roles are pp, dp, fsdp, tp (did you mean 'fsdp'?)"),  # type: ignore[arg-type]
        (lambda: Axis("dp", 0), "the degree of 'dp' is 0: use 1 to 65,536"),
        (lambda: Strategy((Axis("pp", 2),)), "'pp2' is in a layer's…: set the pipeline degree with the plan's pp"),
        (lambda: Strategy((Axis("tp", 1),)), "'tp1' has degree 1: leave the axis out"),
        (lambda: Strategy((Axis("tp", 2), Axis("tp", 4))), "role 'tp' is repeated in a strategy: give each role once"),
        (lambda: Strategy((Axis("tp", 4),), depth=2), "depth 2 is given with tensor mode 1d: only 2.5d has a depth"),
        (lambda: Plan(layers=()), "no block has a strategy (layers named: none): add a group such as *=dp2"),
        (lambda: Plan(layers=(("0", Strategy()), ("*", Strategy((Axis("dp", 2),))))), "'0=dp1' takes 1 rank of a…"),
        (lambda: Plan(pp=0), "the degree of 'pp' is 0: use 1 to 65,536"),
        (lambda: Plan(pp_index=1), "pp_index is 1 but pp can follow at most 0 axes: use 0 to 0"),
        (lambda: Plan(virtual_stages=0), "virtual_stages is 0: use 1 to 1,024"),
        (lambda: Plan(microbatches=0), "microbatches is 0: use 1 to 16,777,216"),
        (lambda: Plan(microbatch_size=-1), "microbatch_size is -1: use 1 to 16,777,216"),
        (lambda: Plan(schedule="1f1bb"), "unknown schedule '1f1bb'…"),
        (lambda: Plan(split="evn"), "unknown split 'evn'…"),
    ],
)
def test_invalid_field_is_refused_on_construction(build, message: str) -> None:
    with says(message):
        build()


@pytest.mark.parametrize("text", ["dp2xpp3xtp2", "pp2xdp2", "tp2xdp3xpp2", "fsdp4", "pp2: 0=dp4, *=tp2xdp2"])
def test_place_of_rank_and_rank_of_place_are_inverse(text: str) -> None:
    plan = parse(text)
    places = [place_of_rank(plan, rank) for rank in range(plan.world_size)]
    assert sorted(places) == [(pp, number) for pp in range(plan.pp or 1) for number in range(plan.stage_size)]
    assert [rank_of_place(plan, *place) for place in places] == list(range(plan.world_size))


def test_leftmost_axis_varies_slowest() -> None:
    places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [place_of_rank(parse("tp2xpp3"), rank) for rank in range(6)] == places
    assert [place_of_rank(parse("pp2xdp2"), rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


NAMES = ("embed", *(f"blocks.{i}" for i in range(6)), "head")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pp1: embed=tp2, 0-2=dp2, *=fsdp2", ["tp2", *["dp2"] * 3, *["fsdp2"] * 4]),
        # Embed and head take the strategy of the neighbouring block.
        ("pp1: 0-2=dp2, 3-5=fsdp2", [*["dp2"] * 4, *["fsdp2"] * 4]),
        ("pp1: 0-2=dp2, 3-5=fsdp2, head=tp2", [*["dp2"] * 4, *["fsdp2"] * 3, "tp2"]),
        ("dp2+ckpt", ["dp2+ckpt"] * 8),
    ],
)
def test_groups_assign_a_strategy_to_every_layer(text: str, expected: list[str]) -> None:
    found = parse(text).strategies(NAMES)
    assert tuple(found) == NAMES
    assert [str(strategy) for strategy in found.values()] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp1: 0-2=dp2, 4-5=fsdp2", "block 3 has no strategy: add a group such as *=dp2 for all that are not named"),
        ("pp1: 0-6=dp2, *=fsdp2", "blocks 0-6 are given a strategy but the model has 6 blocks, 0 to 5…"),
    ],
)
def test_missing_or_unknown_layers_are_refused(text: str, message: str) -> None:
    with says(message):
        parse(text).strategies(NAMES)


def test_num_stages_counts_virtual_ones() -> None:
    plan = replace(parse("dp2xpp3xtp2"), virtual_stages=2)
    assert (plan.pipeline_degree, plan.num_stages, plan.strategy.size) == (3, 6, 4)
    assert plan.world_size == math.prod(axis.size for axis in plan.axes) == 12


def test_reprs_leave_out_defaults() -> None:
    plan = replace(parse("pp2xtp2xdp2"), microbatches=4)
    assert repr(plan) == "Plan(layers=(('*', Strategy('tp2xdp2')),), pp=2, microbatches=4)"
    assert repr(Plan()) == "Plan()"
    assert dir(vitpar) == vitpar.__all__
    config = model_config("vit_small_patch16_224", num_classes=10)
    assert config == eval(repr(config), {"ViTConfig": type(config)}) and len(repr(config)) < 160
    recipe = read_recipe("digits", {"train.seed": 7})
    assert "train={'epochs': 40.0, 'seed': 7," in repr(recipe) and "faults" not in repr(recipe)
