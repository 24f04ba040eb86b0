"""Plan summaries, which `vitpar plan` prints, compared with numbers by hand and with the parameters of ranks."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.ranks import RankPool
from vitpar.models import model_config
from vitpar.models.config import ModelConfig
from vitpar.parallel import Execution, parallelize
from vitpar.planner.cost.elements import layer_parameters
from vitpar.planner.describe import Summary, summarize
from vitpar.sharded import to_local
from vitpar.strategy import Plan, parse, place_of_rank, stage_layers, stages_of_rank, validate

TINY = model_config("vit_tiny_patch16_224")  # width 192, 12 blocks, 3 heads, hidden 768, 197 tokens, 1000 classes
EMBED = (768 * 192 + 192) + 192 + 197 * 192
BLOCK = 2 * 2 * 192 + (192 * 576 + 576) + (192 * 192 + 192) + (192 * 768 + 768) + (768 * 192 + 192)
HEAD = 2 * 192 + (192 * 1000 + 1000)
BASE = model_config("vit_base_patch16_224")


def planned(strategy: str, config: ModelConfig = TINY, batch_size: int = 64, **fields: Any) -> Plan:
    """Return the validated plan of a strategy string with changed fields."""
    return validate(replace(parse(strategy), **fields), config, batch_size)


def summary_of(strategy: str, config: ModelConfig = BASE, **fields: Any) -> Summary:
    return summarize(config, planned(strategy, config, **fields), 64, "fp32", bytes_per_parameter=16)


def rank_parameters(config: ModelConfig, plan: Plan, rank: int) -> dict[str, int]:
    """Return the number of parameter elements that `rank` holds under `plan`, by layer."""
    pp, stage_rank = place_of_rank(plan, rank)
    held, parts = layer_parameters(config, plan, stage_rank), stage_layers(config, plan)
    return {name: held[name] for stage in stages_of_rank(pp, plan) for name in parts[stage]}


def test_unsharded_model_has_the_published_number_of_parameters() -> None:
    assert EMBED + 12 * BLOCK + HEAD == 5_717_416  # timm's vit_tiny_patch16_224
    assert layer_parameters(TINY, Plan()) == {"embed": EMBED, **{f"blocks.{i}": BLOCK for i in range(12)}, "head": HEAD}


def test_summary_lists_stages_and_their_state() -> None:
    summary = summary_of("dp2xpp2", TINY, split=(4, 8))
    first, second = summary["pipeline"]
    assert (first["stages"], second["stages"]) == ([0], [1])
    assert first["layers"] == [["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]]
    assert second["layers"][0][-2:] == ["blocks.11", "head"]
    assert (first["parameters"], second["parameters"]) == (EMBED + 4 * BLOCK, 8 * BLOCK + HEAD)
    assert (second["state_bytes"], second["host_bytes"]) == (16 * second["parameters"], 0)
    assert first["flops_share"] + second["flops_share"] == pytest.approx(1)
    assert 1 / 3 < first["flops_share"] < 0.36  # a third of the blocks and embed
    assert summary["parameters"] == 5_717_416
    assert summary["idle_share"] == pytest.approx(1 / 5)
    assert summary["pipeline_axis"]["degree"] == 2
    assert summary_of("dp4", TINY)["pipeline_axis"] is None


def test_offloaded_layers_count_as_host_memory() -> None:
    (part,) = summary_of("pp1: embed=dp4, *=dp4+offload", TINY)["pipeline"]
    assert part["host_bytes"] == 16 * (12 * BLOCK + HEAD)
    assert part["state_bytes"] == 16 * 5_717_416


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("dp2xtp2", []),
        ("pp1: 0-3=fsdp4, *=dp4", []),  # both have the same token layout
        # From a quarter of the batch to all of it, a rank receives three quarters; in backward nothing.
        ("pp1: 0-3=dp4, 4-11=tp4", [("blocks.4", 0, 0.75, 0)]),
        # Forward: rank 1 goes from its quarter to another half. Backward: it has that half and needs its quarter.
        ("pp1: embed=fsdp4, *=tp2xfsdp2", [("blocks.0", 0, 0.5, 0.25)]),
        ("pp1: embed=fsdp4, *=fsdp2xtp2", [("blocks.0", 0, 0.25, 0)]),
        # Between stages the smaller shards travel, so the stage with the larger ones redistributes.
        ("pp2: 0-5=dp4, 6-11=tp4", [("blocks.6", 1, 0.75, 0)]),
        ("pp2: 0-5=tp4, 6-11=dp4", [("blocks.6", 0, 0, 0.75)]),
    ],
)
def test_summary_lists_redistributions_between_layers(
    strategy: str, changes: list[tuple[str, int, float, float]]
) -> None:
    summary = summary_of(strategy)
    found = [(c["layer"], c["stage"], c["forward"], c["backward"]) for c in summary["redistributions"]]
    assert found == changes
    assert summary["travel"] == ([0.25] if strategy.startswith("pp2") else [])


def axis_words(strategy: str, axis: str, layer: str = "blocks.0", **fields: Any) -> str:
    """Return the description of the communication along one axis of a layer's strategy."""
    parts = summary_of(strategy, **fields)["strategies"]
    axes = next(part["axes"] for part in parts if layer in part["layers"])
    return next(one["communication"] for one in axes if one["axis"] == axis)


ONCE, BOTH, SCATTER = "once a step", "in forward and in backward of every micro-batch", "reduce-scatter gradients"
SENT: list[tuple[str, str, dict[str, Any], str]] = [
    ("dp4", "dp", {"microbatches": 2}, f"all-reduce gradients, {ONCE}"),
    ("dp4+zero1", "dp", {"microbatches": 2}, f"all-gather parameters and {SCATTER}, {ONCE}"),
    ("pp2xdp2+zero2", "dp", {"microbatches": 4}, f"{ONCE}; {SCATTER}, for every"),
    ("fsdp4", "fsdp", {"microbatches": 2}, f"{BOTH}; {SCATTER}, {ONCE}"),
    ("dp2xfsdp2", "dp", {"microbatches": 1}, f"all-reduce the shards of gradients, {ONCE}"),
    ("pp2xfsdp2", "fsdp", {"microbatches": 4}, f"parameters and {SCATTER}, {ONCE}"),
    ("tp4+2d", "i", {"microbatches": 2}, f"batch; all-gather parameters layer by layer, {BOTH}"),
    ("tp8+2.5d", "d", {}, f"split the batch; all-reduce the shards of gradients, {ONCE}"),
    ("fsdp2xtp4+2d", "i", {}, "split the batch; communicate in one group with fsdp"),
]
"""tests/parallel/test_collectives.py and test_priced_bytes.py count what ranks send."""
IN_A_BLOCK: list[tuple[str, str, list[int]]] = [
    ("tp4", "tp", [2, 2]),
    ("tp4+sp", "tp", [2, 2, 4, 2]),
    ("tp4+2d", "j", [4, 4, 4, 2, 4]),
    ("tp8+3d", "j", [2, 2, 4, 2]),
    ("tp8+3d", "k", [2, 4, 2, 4, 2, 2]),
]
"""Numbers of collectives. tests/strategy/test_traffic.py compares the table with what a block sends."""


def test_communication_of_each_axis_is_described() -> None:
    for strategy, axis, fields, words in SENT:
        assert words in axis_words(strategy, axis, **fields), strategy
    for strategy, axis, numbers in IN_A_BLOCK:
        assert [int(number) for number in re.findall(r"\b\d\b", axis_words(strategy, axis))] == numbers, strategy
    assert "forward 1 all-reduce, backward 1 all-gather, for" in axis_words("pp1: head=tp4, *=dp4", "tp", "head")
    assert axis_words("pp1: embed=tp4, *=dp4", "tp", "embed") == "compute the same on all ranks; send nothing"
    fields = {"schedule": "interleaved1f1b", "microbatches": 4}
    assert ONCE in axis_words("pp2xfsdp2", "fsdp", virtual_stages=3, **fields).partition(";")[0]
    # More stages than fit are gathered again.
    assert "3 of a rank's stages at a time" in axis_words("pp2xfsdp2", "fsdp", virtual_stages=4, **fields)


UNEVEN = model_config(
    "vit_nano_patch4_16", num_classes=10, qk_norm=True, layer_scale=0.1, num_reg_tokens=3, distillation=True
)
SWIN = model_config(
    "swin_custom",
    **{"patch_size": 2, "image_size": 16, "window_size": 2, "embed_dim": 24, "depths": (2, 1, 1)},
    **{"num_heads": (4, 12, 12), "mlp_ratio": 2.5, "num_classes": 7},
)
V_SHAPED = {"schedule": "zbvzerobubble", "virtual_stages": 2}
Asked = tuple[ModelConfig, str, dict[str, Any]]
FOUR: list[Asked] = [
    (UNEVEN, "pp1: embed=fsdp4, 0-3=tp2xfsdp2, *=dp4+ckpt", {}),
    (UNEVEN, "pp2: embed=dp2+zero1, 0-2=tp2+sp, *=fsdp2", V_SHAPED),
    (UNEVEN, "tp2xfsdp2+sp", {}),
    (UNEVEN, "dp4+zero1", {}),
    (UNEVEN, "fsdp4+offload", {}),
    (SWIN, "pp1: stage1=fsdp4, stage3=tp4+sp, *=tp2xfsdp2", {}),
    (SWIN, "pp2: stage1=dp2+zero1, 2=tp2+sp, *=fsdp2", {"split": (3, 1)}),
    (SWIN, "tp4+2d", {}),
]
EIGHT: list[Asked] = [
    (UNEVEN, "tp8+2.5d", {}),
    (UNEVEN, "fsdp8", {}),  # 10 classes: the last ranks get no rows
    (UNEVEN, "dp2xtp4+2d+zero1", {}),
    (UNEVEN, "pp1: 0=tp8+3d, 1-2=tp4xfsdp2+2d, 3=tp2xfsdp4+sp, *=dp2xfsdp4", {}),
    (SWIN, "pp2xtp2xfsdp2", {"schedule": "interleaved1f1b", "virtual_stages": 2}),
]


def held_by_layer(device: torch.device, plans: list[tuple[ModelConfig, Plan]]) -> list[dict[str, int]]:
    """Return, for every plan, this rank's number of parameter elements by layer; runs on every rank."""
    found = []
    for config, plan in plans:
        model = parallelize(config, plan, Execution(32), device)
        layers = {name: layer for stage in model.stages.values() for name, layer in stage.layers().items()}
        found.append({name: sum(to_local(p).numel() for p in layer.parameters()) for name, layer in layers.items()})
    return found


@pytest.mark.parametrize("asked", [FOUR, pytest.param(EIGHT, marks=pytest.mark.slow)], ids=["4", "8"])
def test_ranks_hold_the_predicted_number_of_parameters(asked: list[Asked], ranks: Callable[[int], RankPool]) -> None:
    """Memory predictions rest on this count, which must be exact for every rank and layer."""
    plans = [(config, planned(strategy, config, 32, **fields)) for config, strategy, fields in asked]
    (size,) = {plan.world_size for _, plan in plans}
    kept = ranks(size).run(held_by_layer, plans)
    for number, (config, plan) in enumerate(plans):
        for rank in range(size):
            assert kept[rank][number] == rank_parameters(config, plan, rank), f"rank {rank} of '{plan}'"
        for part in summarize(config, plan, 32, "fp32", bytes_per_parameter=16)["pipeline"]:
            mates = [rank for rank in range(size) if place_of_rank(plan, rank)[0] == part["pp"]]
            assert part["parameters"] == max(sum(kept[rank][number].values()) for rank in mates), f"fullest of '{plan}'"
