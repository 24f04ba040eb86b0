"""Galvatron's strategy files: import, export, and both round trips."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.galvatron_files import FILES, SMALL, column
from vitpar.errors import StrategyError
from vitpar.strategy import Axis, Plan, Strategy, parse
from vitpar.strategy.galvatron import from_galvatron, to_galvatron
from vitpar.strategy.layout import place


@pytest.mark.parametrize(
    ("file", "text", "fields"),
    [
        ("huge", "dp2xtp2+zero2", {"microbatches": 1}),
        (
            "old",
            "pp2: embed=dp8, 0-5=fsdp8, 6-11=dp8, 12-17=fsdp8, 18-23=dp8, head=dp8",
            {"microbatches": 2, "schedule": "gpipe"},
        ),
        (
            "layerwise",
            "pp1: embed=fsdp2xtp4, 0-5=fsdp4xtp2+ckpt, 6-28=fsdp4xtp2, 29-31=dp4xtp2+zero2, head=fsdp2xtp4",
            {"microbatches": 1},
        ),
        (
            "mixed",
            "pp2: embed=fsdp12, 0=tp3xdp4+ckpt, 1=fsdp4xtp3, 2=dp12, 3=tp12+ckpt, 4=tp4xfsdp3+ckpt, 5=tp6xdp2, "
            "6=tp2xfsdp6, head=fsdp12",
            {"microbatches": 3, "schedule": "gpipe", "split": (3, 4)},
        ),
        ("small", "pp2xdp2xtp2", {"microbatches": 2, "schedule": "gpipe"}),
    ],
)
def test_imported_files_give_the_expected_plan(file: str, text: str, fields: dict[str, Any]) -> None:
    data, ranks = FILES[file]
    imported = from_galvatron(data, ranks)
    assert imported.plan == replace(parse(text), **fields)
    assert imported.plan.world_size == ranks
    assert imported.batch_size == data["global_bsz"]
    assert imported.num_blocks == len(data["tp_sizes_enc"].split(","))


def test_export_writes_every_key() -> None:
    plan = replace(parse("pp2: embed=fsdp6, 0-2=tp2xdp3+zero2+ckpt, 3-4=tp6, head=fsdp6"), microbatches=4)
    assert to_galvatron(plan, 5, 48) == {
        **{"pp_deg": 2, "tp_sizes_enc": "2,2,2,6,6", "tp_consecutive_flags": "0,0,0,1,1"},
        **{"dp_types_enc": "0,0,0,0,0", "use_sp": "0,0,0,0,0", "checkpoint": "1,1,1,0,0", "global_bsz": 48},
        **{"chunks": 4, "pp_division": "3,2", "pipeline_type": "pipedream_flush", "default_dp_type": "zero2"},
        **{"vtp": 1, "vsp": 0, "embed_sdp": 1, "cp_sizes_enc": "1,1,1,1,1", "vcp": 1},
    }


@pytest.mark.parametrize(
    ("text", "fields", "changes"),
    [
        ("dp2", {"schedule": "gpipe"}, {"pipeline_type": "pipedream_flush", "pp_division": "5"}),
        ("pp2", {"schedule": "gpipe"}, {"pipeline_type": "gpipe", "pp_division": "3,2"}),
        ("pp2", {"split": "balanced"}, {"pp_division": "1,4"}),
        ("fsdp2", {}, {"dp_types_enc": "1,1,1,1,1", "embed_sdp": 1, "default_dp_type": "ddp"}),
        ("dp1", {}, {"tp_consecutive_flags": "1,1,1,1,1", "vtp": 1}),
        ("pp1: 0-2=dp2xtp2, *=fsdp2xtp2", {}, {"dp_types_enc": "0,0,0,1,1", "embed_sdp": 1}),
    ],
)
def test_exported_keys(text: str, fields: dict[str, Any], changes: dict[str, Any]) -> None:
    written = to_galvatron(replace(parse(text), microbatches=2, **fields), 5, 8, costs=(0, 9, 1, 1, 1, 1, 0))
    assert written | changes == written


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int, int, tuple[int, ...]]:
    """Draw a plan that Galvatron can express, as import returns it.

    Returns (plan, number of blocks, batch size, numbers of the blocks without values in the file).
    """
    depth, stage = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 4, 6, 12, 15]))
    zero = draw(st.sampled_from([0, 2]))
    unlisted = (draw(st.integers(0, depth - 2)),) if depth > 1 and draw(st.booleans()) else ()
    pp = draw(st.integers(1, depth - len(unlisted)))

    def strategy(outside: bool) -> Strategy:
        tp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
        role = draw(st.sampled_from(["dp", "fsdp"]))
        axes = [Axis(role, stage // tp), Axis("tp", tp)]
        if not outside and draw(st.booleans()):
            axes.reverse()
        return Strategy(
            tuple(axis for axis in axes if axis.size > 1),
            zero=zero if role == "dp" and tp < stage else 0,
            checkpoint=None if outside else draw(st.sampled_from([None, "full"])),
        )

    outside = strategy(outside=True)
    blocks = [outside if draw(st.booleans()) else strategy(outside=False) for _ in range(depth)]
    blocks = [outside if index in unlisted else block for index, block in enumerate(blocks)]
    named = (("embed", outside), *((str(index), block) for index, block in enumerate(blocks)), ("head", outside))
    possible = [cut for cut in range(1, depth) if cut - 1 not in unlisted]
    cuts = sorted(draw(st.sets(st.sampled_from(possible), min_size=pp - 1, max_size=pp - 1))) if pp > 1 else []
    sizes = tuple(end - start for start, end in zip([0, *cuts], [*cuts, depth], strict=True))
    even = tuple(depth // pp + (index < depth % pp) for index in range(pp))
    plan = Plan(
        named if set(blocks) != {outside} else (("*", outside),),
        pp,
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])) if pp > 1 else "1f1b",
        microbatches=draw(st.integers(1, 6)),
        split="even" if sizes == even else sizes,
    )
    parts = math.lcm(*(layer.degree("dp") * layer.degree("fsdp") for layer in (outside, *blocks)))
    return plan, depth, parts * plan.microbatches * draw(st.integers(1, 3)), unlisted


@given(plans())
def test_plans_are_unchanged_by_export_and_import(drawn: tuple[Plan, int, int, tuple[int, ...]]) -> None:
    plan, depth, batch, unlisted = drawn
    written = json.loads(json.dumps(to_galvatron(plan, depth, batch, unlisted=unlisted)))
    assert len(written["tp_sizes_enc"].split(",")) == depth - len(unlisted)
    imported = from_galvatron(written, plan.world_size, depth, unlisted)
    assert (imported.plan, imported.num_blocks, imported.batch_size) == (plan, depth, batch)
    assert to_galvatron(imported.plan, depth, batch, unlisted=unlisted) == written


@pytest.mark.parametrize(
    ("changes", "ranks", "microbatches"),
    [
        ({"chunks": -1, "global_bsz": 160, "pp_deg": 1, "pp_division": "4"}, 8, 1),
        ({"chunks": -1, "global_bsz": 16}, 8, 1),
        ({"chunks": -1, "global_bsz": 128}, 8, 8),
        ({"chunks": -1, "global_bsz": 2}, 8, 1),
    ],
)
def test_chunks_follow_galvatrons_rule(changes: dict[str, Any], ranks: int, microbatches: int) -> None:
    assert from_galvatron(SMALL | changes, ranks).plan.microbatches == microbatches


def test_indivisible_chunks_are_refused() -> None:
    """The rule rounds 18 / 4 up to 5; Galvatron then runs micro-batches of unequal sizes, which vitpar does not."""
    data = SMALL | {"chunks": -1, "global_bsz": 36, "vtp": 1, "tp_sizes_enc": "1,1,1,1"}
    with pytest.raises(StrategyError, match=r"^5 micro-batches cannot split the 18 samples .* evenly: use 2, 3 or 6$"):
        from_galvatron(data, 4)


@pytest.mark.parametrize(("flag", "groups"), [(1, ["012", "345"]), (0, ["024", "135"])])
def test_consecutive_flag_places_tp_ranks(flag: int, groups: list[str]) -> None:
    """Consecutive tp groups in Galvatron are runs of ranks; the other groups take every (S / t)-th rank."""
    data = SMALL | {"tp_sizes_enc": column((3, 4)), "tp_consecutive_flags": column((flag, 4)), "vtp": 3}
    strategy = from_galvatron(data | {"global_bsz": 24}, 12).plan.strategies(
        ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    )["blocks.0"]
    found: dict[int, str] = {}
    for rank in range(6):
        index = place(strategy, rank)["dp"]
        found[index] = found.get(index, "") + str(rank)
    assert list(found.values()) == groups


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"embed_sdp": 1}, "pp2: embed=fsdp2xtp2, 0-3=dp2xtp2, head=fsdp2xtp2"),
        ({"vocab_sdp": 1}, "pp2: embed=fsdp2xtp2, 0-3=dp2xtp2, head=fsdp2xtp2"),
        ({"vocab_sdp": 1, "embed_sdp": 1}, "pp2: embed=fsdp2xtp2, 0-3=dp2xtp2, head=fsdp2xtp2"),
        ({"default_dp_type": "zero3"}, "pp2xfsdp2xtp2"),
        ({"default_dp_type": "zero3", "dp_types_enc": "1,0,0,1", "embed_sdp": 1}, "pp2xfsdp2xtp2"),
        ({"default_dp_type": "zero2"}, "pp2xdp2xtp2+zero2"),
        ({"default_dp_type": "zero2", "dp_types_enc": "1,1,1,1", "embed_sdp": 1}, "pp2xfsdp2xtp2"),
        ({"default_dp_type": "zero2", "tp_sizes_enc": "4,4,4,4", "vtp": 4}, "pp2xtp4"),
        ({"tp_consecutive_flags": "0,0,0,0"}, "pp2: embed=dp2xtp2, 0-3=tp2xdp2, head=dp2xtp2"),
        (
            {"tp_sizes_enc": "1,1,4,4", "tp_consecutive_flags": "0,1,0,1"},
            "pp2: embed=dp2xtp2, 0-1=dp4, 2-3=tp4, head=dp2xtp2",
        ),
        ({"checkpoint": "1,1,1,1"}, "pp2: embed=dp2xtp2, 0-3=dp2xtp2+ckpt, head=dp2xtp2"),
        ({"vtp": 1, "vsp": 1, "tp_sizes_enc": "1,1,1,1", "use_sp": "1,1,0,0"}, "pp2xdp4"),
        ({"ep_sizes_enc": "1,1,1,1", "tp_of_ep_sizes_enc": "1,1,1,1", "vcp": 1}, "pp2xdp2xtp2"),
    ],
)
def test_keys_change_the_imported_layers(changes: dict[str, Any], text: str) -> None:
    assert from_galvatron(SMALL | changes, 8).plan.layers == parse(text).layers
