"""Descriptions of a plan's communication, which `vitpar plan` prints."""

import re
from dataclasses import replace
from typing import Any

import pytest

from vitpar.models import model_config
from vitpar.planner.describe import Summary, summarize
from vitpar.strategy import Plan, parse, validate

BASE = model_config("vit_base_patch16_224")


def planned(strategy: str, batch_size: int = 64, **fields: Any) -> Plan:
    """Return the validated plan of a strategy string with changed fields."""
    return validate(replace(parse(strategy), **fields), BASE, batch_size)


def summary_of(strategy: str, layer: str = "blocks.0", **fields: Any) -> Summary:
    """Return the description of a layer's strategy."""
    summary = summarize(BASE, planned(strategy, **fields), 64, "fp32", bytes_per_parameter=16)
    return next(part for part in summary["strategies"] if layer in part["layers"])


def words_of(strategy: str, axis: str, layer: str = "blocks.0", **fields: Any) -> str:
    """Return the description of one axis of a layer's strategy."""
    return next(one["communication"] for one in summary_of(strategy, layer, **fields)["axes"] if one["axis"] == axis)


ONCE, FORWARD = "once a step", "in forward of every micro-batch"
BOTH = "in forward and in backward of every micro-batch"
SCATTER = "reduce-scatter gradients"


@pytest.mark.parametrize(
    ("strategy", "axis", "fields", "words"),
    [
        ("dp4", "dp", {"microbatches": 2}, f"all-reduce gradients, {ONCE}"),
        ("dp4+zero1", "dp", {"microbatches": 2}, f"all-gather parameters and {SCATTER}, {ONCE}"),
        ("dp4+zero2", "dp", {"microbatches": 2}, f"{ONCE}; {SCATTER}, for every"),
        ("fsdp4", "fsdp", {"microbatches": 2}, f"{BOTH}; {SCATTER}, {ONCE}"),
        ("dp2xfsdp2", "dp", {"microbatches": 1}, f"all-reduce the shards of gradients, {ONCE}"),
        ("pp2xfsdp2", "fsdp", {"microbatches": 4}, f"parameters and {SCATTER}, {ONCE}"),
        ("pp2xdp2+zero2", "dp", {"microbatches": 4}, f"{ONCE}; {SCATTER}, for every"),
        ("tp4+2d", "i", {"microbatches": 2}, f"batch; all-gather parameters layer by layer, {BOTH}"),
        ("tp8+2.5d", "d", {}, f"split the batch; all-reduce the shards of gradients, {ONCE}"),
        ("dp2xtp4+2d", "dp", {}, f"all-reduce the shards of gradients, {ONCE}"),
        ("fsdp2xtp4+2d", "i", {}, "split the batch; communicate in one group with fsdp"),
    ],
)
def test_words_of_data_axes(strategy: str, axis: str, fields: dict[str, Any], words: str) -> None:
    """tests/parallel/test_collectives.py and test_priced_bytes.py count what ranks send."""
    assert words in words_of(strategy, axis, **fields)


@pytest.mark.parametrize(
    ("strategy", "axis", "numbers"),
    [
        ("tp4", "tp", [2, 2]),
        ("tp4+sp", "tp", [2, 2, 4, 2]),
        ("tp4+2d", "j", [4, 4, 4, 2, 4]),
        ("tp8+3d", "j", [2, 2, 4, 2]),
        ("tp8+3d", "k", [2, 4, 2, 4, 2, 2]),
    ],
)
def test_collectives_of_a_block_along_tensor_axes(strategy: str, axis: str, numbers: list[int]) -> None:
    """tests/strategy/test_traffic.py compares the table with what a block sends."""
    assert [int(number) for number in re.findall(r"\b\d\b", words_of(strategy, axis))] == numbers


def test_stem_and_head_have_their_own_descriptions() -> None:
    assert "forward 1 all-reduce, backward 1 all-gather, for" in words_of("pp1: head=tp4, *=dp4", "tp", "head")
    assert words_of("pp1: embed=tp4, *=dp4", "tp", "embed") == "compute the same on all ranks; send nothing"
    assert "forward 2 all-reduces, backward 2" in words_of("pp1: 3=tp4, head=tp4, *=dp4", "tp", "head")


def test_more_stages_than_fit_are_gathered_again() -> None:
    fields = {"schedule": "interleaved1f1b", "microbatches": 4}
    assert ONCE in words_of("pp2xfsdp2", "fsdp", virtual_stages=3, **fields).partition(";")[0]
    assert "3 of a rank's stages at a time" in words_of("pp2xfsdp2", "fsdp", virtual_stages=4, **fields)
