"""Initial parameters depend only on the seed and the name: they are equal under every plan."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from helpers.plans import EVERYTHING
from helpers.ranks import RankPool
from vitpar import Execution, ViTConfig, model_config, parallelize, parse, validate
from vitpar.models.initial import initial_value, initialise
from vitpar.models.layers import LayeredModel

BATCH = 16
PLANS = ("dp2", "fsdp2", "tp2", "pp2", "pp2xtp2xdp2")


def config_of(**options: Any) -> ViTConfig:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 3}
    return model_config("vit_custom", **{**sizes, **EVERYTHING, **options})


def digest(tensor: Tensor) -> str:
    """Return a hash of all bits of a tensor."""
    return hashlib.blake2b(tensor.detach().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def one_process(seed: int, config: ViTConfig) -> dict[str, Tensor]:
    model = LayeredModel(config)
    initialise(model, seed, config)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gathered(device: torch.device, mesh: str, seed: int, precision: str, refill: bool) -> dict[str, str]:
    """Return digests of the complete parameters that this rank holds a shard of; runs on every rank.

    refill: first set every parameter to NaN and initialise again
    """
    config = config_of()
    plan = validate(parse(mesh), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, precision=precision, seed=seed), device)
    if refill:
        for stage in model.stages.values():
            for parameter in stage.parameters():
                parameter.detach().fill_(torch.nan)
            initialise(stage, seed, config)
    wholes = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        wholes[name] = digest(whole.detach().float())
    return wholes


def union(parts: list[dict[str, str]]) -> dict[str, str]:
    """Merge the digests of all ranks, and check that ranks with the same parameter agree."""
    whole: dict[str, str] = {}
    for part in parts:
        assert all(whole.get(name, value) == value for name, value in part.items())
        whole |= part
    return whole


@pytest.mark.parametrize("mesh", PLANS)
def test_every_plan_starts_from_the_same_values(mesh: str, ranks: Callable[[int], RankPool]) -> None:
    """Plans can be compared only if they start from identical parameters."""
    expected = {name: digest(value) for name, value in one_process(5, config_of()).items()}
    found = ranks(parse(mesh).world_size).run(gathered, mesh, 5, "fp32", False)
    assert union(found) == expected


@pytest.mark.parametrize("mesh", ("pp2", "fsdp2"))
def test_every_precision_starts_from_the_same_values(mesh: str, ranks: Callable[[int], RankPool]) -> None:
    expected = {name: digest(value) for name, value in one_process(5, config_of()).items()}
    assert union(ranks(2).run(gathered, mesh, 5, "fp64", False)) == expected


@pytest.mark.parametrize("mesh", ("fsdp2", "tp2", "pp2"))
def test_initialise_fills_every_shard(mesh: str, ranks: Callable[[int], RankPool]) -> None:
    """The parameters are set to NaN first, so a part that stays unfilled shows."""
    expected = {name: digest(value) for name, value in one_process(0, config_of()).items()}
    assert union(ranks(2).run(gathered, mesh, 0, "fp32", True)) == expected


def test_float64_parameters_equal_the_float32_values_exactly(alone: None) -> None:
    config = config_of()
    plan = validate(parse("dp1"), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, precision="fp64", seed=5), torch.device("cpu"))
    expected = one_process(5, config)
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.float64 and torch.equal(parameter, expected[name].double()), name


@pytest.mark.parametrize("options", [{}, {"position": "sincos2d"}, {"pool": "avg", "distillation": False}], ids=str)
def test_initialise_fills_every_parameter_and_buffer(options: dict[str, Any]) -> None:
    config = config_of(representation_size=12, **options)
    model = LayeredModel(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    initialise(model, 0, config)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.isfinite().all() and not (tensor == -1).all(), name


def test_values_depend_on_seed_and_name() -> None:
    one, same, other = (one_process(seed, config_of()) for seed in (1, 1, 2))
    drawn = {name for name, value in one.items() if value.unique().numel() > 1}
    assert {name.rpartition(".")[2] for name in one.keys() - drawn} == {"weight", "bias", "gamma"}
    assert "embed.cls_token" in drawn and "blocks.2.mlp.fc2.weight" in drawn and "head.fc_dist.weight" not in drawn
    for name, value in one.items():
        assert torch.equal(value, same[name])
        assert torch.equal(value, other[name]) == (name not in drawn), name
    assert not torch.equal(one["blocks.0.attn.qkv.weight"], one["blocks.1.attn.qkv.weight"])


def test_initial_values_neither_use_nor_advance_the_global_rng() -> None:
    """A program that draws its own random numbers gets the same model and the same numbers."""
    shape, config = torch.Size((24, 96)), config_of()
    torch.manual_seed(0)
    first = initial_value("blocks.0.mlp.fc2.weight", shape, 3, config)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(initial_value("blocks.0.mlp.fc2.weight", shape, 3, config), first)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), after)  # the global generator did not advance
