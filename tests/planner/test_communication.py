"""Descriptions of a plan's communication, compared with the collectives that ranks call."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.ranks import RankPool
from vitpar.models import model_config
from vitpar.parallel import Communication, Execution, parallelize
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
SENT: dict[int, list[tuple[str, str, dict[str, Any], list[int], str]]] = {
    4: [
        # Plan, axis, fields, [all-gathers, reduce-scatters, all-reduces] of a block in a step along data axes, words.
        ("dp4", "dp", {"microbatches": 2}, [0, 0, 1], f"all-reduce gradients, {ONCE}"),
        ("dp4+zero1", "dp", {"microbatches": 2}, [1, 1, 0], f"all-gather parameters and {SCATTER}, {ONCE}"),
        ("dp4+zero2", "dp", {"microbatches": 2}, [1, 2, 0], f"{ONCE}; {SCATTER}, for every"),
        ("fsdp4", "fsdp", {"microbatches": 2}, [4, 1, 0], f"{BOTH}; {SCATTER}, {ONCE}"),
        ("dp2xfsdp2", "dp", {"microbatches": 1}, [2, 1, 1], f"all-reduce the shards of gradients, {ONCE}"),
        ("pp2xfsdp2", "fsdp", {"microbatches": 4}, [1, 1, 0], f"parameters and {SCATTER}, {ONCE}"),
        ("pp2xdp2+zero2", "dp", {"microbatches": 4}, [1, 4, 0], f"{ONCE}; {SCATTER}, for every"),
        ("tp4+2d", "i", {"microbatches": 2}, [4, 1, 0], f"batch; all-gather parameters layer by layer, {BOTH}"),
    ],
    8: [
        ("tp8+2.5d", "d", {}, [2, 1, 1], f"split the batch; all-reduce the shards of gradients, {ONCE}"),
        ("dp2xtp4+2d", "dp", {}, [2, 1, 1], f"all-reduce the shards of gradients, {ONCE}"),
        ("fsdp2xtp4+2d", "i", {}, [2, 1, 0], "split the batch; communicate in one group with fsdp"),
    ],
}
IN_BLOCKS: dict[int, list[tuple[str, list[int], dict[str, list[int]]]]] = {
    4: [
        # Plan, the same counts per micro-batch along tensor axes, and the numbers in each axis's description.
        ("tp4", [0, 0, 4], {"tp": [2, 2]}),
        ("tp4+sp", [2 + 4, 2 + 2, 0], {"tp": [2, 2, 4, 2]}),
        ("tp4+2d", [4 + 4, 4, 6], {"j": [4, 4, 4, 2, 4]}),
    ],
    8: [("tp8+3d", [2 * (2 + 4), 2 * (2 + 2), 6], {"j": [2, 2, 4, 2], "k": [2, 4, 2, 4, 2, 2]})],
}
KINDS = ("allgather", "reducescatter", "allreduce")


class Counted(TorchDispatchMode):
    """Counter of collectives: `data` those of ``fully_shard`` and `GradientSum`, `tensor` the functional ones."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.tensor = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = operation.name().partition("::")
        kind = next((kind for kind in KINDS if name.replace("_", "").startswith(kind)), None)
        if kind and "c10d" in namespace:
            (self.tensor if "functional" in namespace else self.data)[kind] += 1
        return operation(*args, **(kwargs or {}))


def counts(device: torch.device, plan: Plan, depth: int) -> tuple[Counter[str], Counter[str]]:
    """Return the collectives along data and along tensor axes in the second step of a model with `depth` blocks."""
    config = replace(model_config("vit_nano_patch4_16", num_classes=12), depth=depth)
    # A tiny bucket cap: such small blocks would share a message, unlike blocks of a real size.
    model = parallelize(config, plan, Execution(32, communication=Communication(bucket_cap_mb=1e-6)), device)
    images = torch.randn(32, 3, 16, 16)[model.image_rows(32)] if model.takes_images else None
    labels = torch.zeros(32, dtype=torch.int64)
    model.forward_backward(images, labels)
    with Counted() as counted:
        model.forward_backward(images, labels)
    return counted.data, counted.tensor


def sent_by_a_block(device: torch.device, plans: list[Plan]) -> list[tuple[list[int], list[int]]]:
    """Return, for every plan, a block's collectives in a step along data and tensor axes; runs on every rank."""
    found = []
    for plan in plans:
        more, fewer = counts(device, plan, 4), counts(device, plan, 2)
        blocks = 2 // plan.pipeline_degree
        data, tensor = ([(a[kind] - b[kind]) // blocks for kind in KINDS] for a, b in zip(more, fewer, strict=True))
        found.append((data, tensor))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_descriptions_match_the_collectives(size: int, ranks: Callable[[int], RankPool]) -> None:
    """`vitpar plan` prints these descriptions, so the numbers in them must equal the counted collectives."""
    plans = [planned(strategy, 32, **fields) for strategy, _, fields, _, _ in SENT[size]]
    plans += [planned(strategy, 32) for strategy, _, _ in IN_BLOCKS[size]]
    found = ranks(size).run(sent_by_a_block, plans)[0]
    for (strategy, axis, fields, expected, words), (data, _) in zip(SENT[size], found, strict=False):
        assert data == expected, strategy
        assert words in words_of(strategy, axis, **fields)
    for (strategy, expected, numbers), (_, tensor) in zip(IN_BLOCKS[size], found[len(SENT[size]) :], strict=True):
        assert tensor == expected, strategy
        for axis, wanted in numbers.items():
            assert [int(number) for number in re.findall(r"\b\d\b", words_of(strategy, axis))] == wanted, strategy


def test_stem_and_head_have_their_own_descriptions() -> None:
    assert "forward 1 all-reduce, backward 1 all-gather, for" in words_of("pp1: head=tp4, *=dp4", "tp", "head")
    assert words_of("pp1: embed=tp4, *=dp4", "tp", "embed") == "compute the same on all ranks; send nothing"
    assert "forward 2 all-reduces, backward 2" in words_of("pp1: 3=tp4, head=tp4, *=dp4", "tp", "head")


def test_more_stages_than_fit_are_gathered_again() -> None:
    fields = {"schedule": "interleaved1f1b", "microbatches": 4}
    assert ONCE in words_of("pp2xfsdp2", "fsdp", virtual_stages=3, **fields).partition(";")[0]
    assert "3 of a rank's stages at a time" in words_of("pp2xfsdp2", "fsdp", virtual_stages=4, **fields)
