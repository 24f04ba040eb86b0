"""Whether parameters are gathered once or twice a step: the search chooses between +zero1 and fsdp by memory."""

import functools
from dataclasses import replace

import pytest

import vitpar
from vitpar.models import model_config
from vitpar.planner.cost import layer
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.strategy import Communication, parse, validate
from vitpar.strategy.execution import Rules

BASE = model_config("vit_base_patch16_224")


def priced(
    patch: pytest.MonkeyPatch, mesh: str, precision: str, device: str, microbatches: int = 1, **settings: bool
) -> Price:
    """Return the price of a plan of ViT-B for 512 images.

    settings: fields of `Communication`, instead of the default settings, which are all that the planner prices.
    """
    hardware = find_cluster("8xH100").hardware().model_copy(update={"device": device})
    model = estimate_model(BASE, precision, hardware, tensors(BASE, 8)).model_copy(update={"device": device})
    plan = validate(replace(parse(mesh), microbatches=microbatches), BASE, 512)
    with patch.context() as patched:
        patched.setattr(layer, "Rules", functools.partial(Rules, communication=Communication(**settings)))
        return price(plan, LayerCosts(BASE, hardware, model), 512)


@pytest.mark.parametrize(
    ("fsdp", "zero1", "precision", "device"),
    [
        ("fsdp8", "dp8+zero1", "fp32", "cpu"),
        ("fsdp8+ckpt", "dp8+zero1+ckpt", "bf16", "cpu"),
        ("tp2xfsdp4+sp", "tp2xdp4+sp+zero1", "bf16", "cuda"),
    ],
)
def test_zero1_is_priced_as_fsdp_that_keeps_parameters_until_backward(
    fsdp: str, zero1: str, precision: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = priced(monkeypatch, zero1, precision, device)
    kept = priced(monkeypatch, fsdp, precision, device, reshard_after_forward=False)
    assert (kept.seconds, kept.time, kept.memory) == (once.seconds, once.time, once.memory)
    freed = priced(monkeypatch, fsdp, precision, device)
    assert freed.seconds > once.seconds and freed.memory_bytes < once.memory_bytes
    # With several micro-batches only +zero1 keeps them from one to the next, at no higher peak.
    once = priced(monkeypatch, zero1, precision, device, 4)
    kept = priced(monkeypatch, fsdp, precision, device, 4, reshard_after_forward=False)
    assert kept.seconds > once.seconds and kept.memory == once.memory


def found(memory: float | str, *roles: str) -> tuple[Price, list[int]]:
    """Return the best plan of ViT-L under a budget, and its numbers of blocks under +zero1 and under fsdp."""
    result = vitpar.search(
        "vit_large_patch16_224",
        **{"cluster": "8xL40S", "batch_size": 256, "precision": "bf16", "microbatches": 1, "memory": memory},
        roles=roles or ("dp", "fsdp"),
        without=("zero2", "ckpt", "ckpt.selective", "offload"),
    )
    layers = model_config("vit_large_patch16_224").layer_names
    used = [str(strategy) for strategy in result.plans[0].plan.strategies(layers).values()][1:-1]
    return result.plans[0], [used.count("dp8+zero1"), used.count("fsdp8")]


def test_search_takes_zero1_for_as_many_blocks_as_memory_allows() -> None:
    fastest, blocks = found("44GB")
    assert blocks == [24, 0]
    smallest, blocks = found("44GB", "fsdp")
    assert blocks == [0, 24] and smallest.seconds > fastest.seconds
    most, least = fastest.memory_bytes, smallest.memory_bytes
    plans = [found(least + share * (most - least)) for share in (1, 0.5, 0)]
    kept = [zero1 for _, (zero1, fsdp) in plans if zero1 + fsdp == 24]
    assert len(kept) == 3
    # fsdp holds the gathered parameters of two blocks at a time, so two could keep them within its memory, but one
    # strategy for all blocks is preferred.
    assert kept[0] == 24 and 4 < kept[1] < 20 and kept[-1] == 0
    seconds = [plan.seconds for plan, _ in plans]
    assert seconds == sorted(seconds)
