"""What `vitpar.parallel.summary` predicts, against numbers computed by hand and against what `parallelize` makes."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from vitpar.models import model_config
from vitpar.models.config import ViTConfig
from vitpar.parallel import parallelize
from vitpar.parallel.pipeline import stage_layers
from vitpar.parallel.summary import chunk_length, idle_share, layer_parameters, summarize
from vitpar.strategy import Plan, coordinates, parse, stages_of_rank, validate
from vitpar.train.optimizer import local

TINY = model_config("vit_tiny_patch16_224")  # width 192, 12 blocks, 3 heads, hidden 768, 197 tokens, 1000 classes
STEM = (768 * 192 + 192) + 192 + 197 * 192
BLOCK = 2 * 2 * 192 + (192 * 576 + 576) + (192 * 192 + 192) + (192 * 768 + 768) + (768 * 192 + 192)
HEAD = 2 * 192 + (192 * 1000 + 1000)


def planned(strategy: str, config: ViTConfig = TINY, batch_size: int = 64, **fields: object) -> Plan:
    """The validated plan of a strategy string with some fields changed."""
    return validate(replace(parse(strategy), **fields), config, batch_size)


def rank_parameters(config: ViTConfig, plan: Plan, rank: int) -> int:
    """How many elements of parameters `rank` keeps under `plan`."""
    place = coordinates(plan, rank)
    held, parts = layer_parameters(config, plan, place), stage_layers(config, plan)
    return sum(held[name] for stage in stages_of_rank(place["pp"], plan) for name in parts[stage])


def test_a_whole_model_has_the_published_number_of_parameters() -> None:
    assert STEM + 12 * BLOCK + HEAD == 5_717_416  # timm's vit_tiny_patch16_224
    assert layer_parameters(TINY, Plan(), {}) == {
        "stem": STEM,
        **{f"blocks.{i}": BLOCK for i in range(12)},
        "head": HEAD,
    }
    assert rank_parameters(TINY, Plan(), 0) == 5_717_416


def test_tp_splits_weights_and_column_biases_but_not_row_biases() -> None:
    block = 2 * 2 * 192 + (192 * 192 + 192) + (64 * 192 + 192) + (192 * 256 + 256) + (256 * 192 + 192)
    head = 2 * 192 + (64 * 1000 + 1000)
    made = layer_parameters(TINY, planned("tp3"), {})
    assert (made["stem"], made["blocks.0"], made["head"]) == (STEM, block, head)


def test_fsdp_splits_dim_0_and_the_first_ranks_are_the_fullest() -> None:
    plan = planned("fsdp5", batch_size=10)
    first, last = (layer_parameters(TINY, plan, {"fsdp": index})["stem"] for index in (0, 4))
    assert first == (39 * 768 + 39) + 192 + 197 * 192  # positions and token have one row, which rank 0 gets
    assert last == 36 * 768 + 36
    assert sum(rank_parameters(TINY, plan, rank) for rank in range(5)) == 5_717_416


@pytest.mark.parametrize(
    ("length", "parts", "lengths"), [(8, 4, [2, 2, 2, 2]), (5, 4, [2, 2, 1, 0]), (1, 3, [1, 0, 0]), (3, 1, [3])]
)
def test_parts_are_those_of_torch_chunk(length: int, parts: int, lengths: list[int]) -> None:
    assert [chunk_length(length, parts, index) for index in range(parts)] == lengths
    assert [len(part) for part in torch.empty(length).chunk(parts)] == [n for n in lengths if n]


def test_stages_and_their_state() -> None:
    summary = summarize(TINY, planned("dp2xpp2", split=(4, 8)), 64, bytes_per_parameter=16)
    first, second = summary.pipeline
    assert (first.stages, second.stages) == ((0,), (1,))
    assert first.layers == (("stem", "blocks.0", "blocks.1", "blocks.2", "blocks.3"),)
    assert second.layers[0][-2:] == ("blocks.11", "head")
    assert (first.parameters, second.parameters) == (STEM + 4 * BLOCK, 8 * BLOCK + HEAD)
    assert second.state_bytes == 16 * second.parameters
    assert first.flops_share + second.flops_share == pytest.approx(1)
    assert 1 / 3 < first.flops_share < 0.36  # a third of the blocks and the stem
    assert summary.parameters == 5_717_416
    assert [(axis.role, axis.degree) for axis in summary.axes] == [("dp", 2), ("pp", 2)]


def test_a_rank_of_an_interleaved_schedule_holds_several_stages() -> None:
    summary = summarize(TINY, planned("pp2", schedule="interleaved1f1b", virtual_stages=3), 64, bytes_per_parameter=16)
    assert [part.stages for part in summary.pipeline] == [(0, 2, 4), (1, 3, 5)]
    assert summary.pipeline[0].layers[1] == ("blocks.4", "blocks.5")
    assert summary.pipeline[0].parameters == STEM + 6 * BLOCK


@pytest.mark.parametrize(
    ("strategy", "fields", "microbatches", "share"),
    [
        ("dp8", {}, 4, 0),
        ("pp2", {"schedule": "gpipe"}, 4, 1 / 5),
        ("pp4", {"schedule": "1f1b"}, 8, 3 / 11),
        ("pp4", {"schedule": "interleaved1f1b", "virtual_stages": 2}, 8, 3 / 19),
    ],
)
def test_idle_share(strategy: str, fields: dict[str, object], microbatches: int, share: float) -> None:
    assert idle_share(replace(parse(strategy), **fields), microbatches) == pytest.approx(share)


def test_fsdp_gathers_once_a_step_under_a_pipeline() -> None:
    def of_fsdp(strategy: str) -> str:
        axes = summarize(TINY, planned(strategy), 64, bytes_per_parameter=16).axes
        return next(axis.communication for axis in axes if axis.role == "fsdp")

    assert "layer by layer" in of_fsdp("fsdp2")
    assert "layer by layer" not in of_fsdp("pp2xfsdp2")


UNEVEN = model_config("vit_nano_patch4_16", num_classes=10, qk_norm=True, layer_scale=0.1, registers=3)
OF_EIGHT: list[tuple[str, dict[str, object]]] = [
    ("pp2xtp2xdp2", {}),
    ("tp4xfsdp2", {}),
    ("fsdp8", {}),
    ("dp2xfsdp4", {}),
    ("pp2xfsdp2xtp2", {"schedule": "interleaved1f1b", "virtual_stages": 2}),
]


def predicted_and_held(rank: int) -> list[tuple[int, int]]:
    """For every plan OF_EIGHT, what `rank` should keep and what it does keep.

    For a process of its own: it pretends to be this rank in a world whose collectives do nothing, and torch caches
    where a rank stands.
    """
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    pairs = []
    for strategy, fields in OF_EIGHT:
        plan = planned(strategy, UNEVEN, 32, **fields)
        model = parallelize(UNEVEN, plan, batch_size=32, device=torch.device("cpu"))
        held = sum(local(parameter).numel() for _, parameter in model.named_parameters())
        pairs.append((rank_parameters(UNEVEN, plan, rank), held))
    return pairs


@pytest.mark.parametrize("rank", [3, 7])
def test_a_rank_keeps_what_was_predicted(rank: int) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        for (strategy, _), (predicted, held) in zip(
            OF_EIGHT, process.submit(predicted_and_held, rank).result(), strict=True
        ):
            assert predicted == held, f"rank {rank} of {strategy}"
