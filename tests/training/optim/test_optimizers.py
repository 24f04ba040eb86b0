"""LAMB, LARS and Muon: sharded parameters end as whole ones do in a plain loop over one process."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from helpers.collectives import Sent
from helpers.optimizer_references import LAMB, LARS, MUON, RATES, VARIANTS, reference, section, shown
from helpers.ranks import RankPool
from helpers.sharded_parameters import (
    HEADS,
    LAYERS,
    LAYOUTS,
    MESHES,
    SHAPES,
    built,
    drawn,
    give_gradients,
    like,
    modules,
    ranks_of,
    whole,
)
from vitpar.sharded import local
from vitpar.training.optim.norms import WholeNorms
from vitpar.training.optim.optimizer import ShardedOptimizer


def optimizer_of(root: nn.Module, settings: Mapping[str, Any]) -> ShardedOptimizer:
    return ShardedOptimizer(root.named_parameters(), section(settings), heads=HEADS)


def trained(device: torch.device, layout: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The whole parameters that this rank holds a part of, after a step for each of RATES; runs on every rank."""
    root = built(layout)
    for name, p in root.named_parameters():
        assert torch.equal(whole(p), drawn("value", name)), name
        given = like(drawn("value", name), p)
        assert not isinstance(p, DTensor) or torch.equal(p.to_local(), given.to_local()), name
    optimizer = optimizer_of(root, settings)
    for step, rate in enumerate(RATES, start=1):
        give_gradients(root, step)
        optimizer.step(rate)
    return {name: whole(p).numpy() for name, p in root.named_parameters()}


CASES = [(layout, settings) for layout in (*MESHES, *LAYOUTS) for settings in (LAMB, LARS, MUON)]


@pytest.mark.parametrize(
    ("layout", "settings"), [*CASES, *(("tp2xfsdp2", settings) for settings in VARIANTS)], ids=shown
)
def test_sharded_equals_one_process(layout: str, settings: dict[str, Any], ranks: Callable[[int], RankPool]) -> None:
    expected = reference(settings)
    seen = set()
    for found in ranks(ranks_of(layout)).run(trained, layout, settings):
        seen |= set(found)
        for name, value in found.items():
            torch.testing.assert_close(torch.from_numpy(value), expected[name], atol=1e-11, rtol=1e-11, msg=name)
    assert seen == set(SHAPES)


def norms(device: torch.device, layout: str) -> dict[str, tuple[float, float]]:
    """Norms of all whole parameters and of 3 times their gradients, by name; runs on every rank."""
    root = built(layout)
    give_gradients(root, 1)
    named = dict(root.named_parameters())
    values = [local(p.detach()) for p in named.values()], [3 * local(p.grad) for p in named.values()]
    found = WholeNorms(list(named.values()))(*values)
    return dict(zip(named, zip(*found.tolist(), strict=True), strict=True))


@pytest.mark.parametrize("layout", [*MESHES, *LAYOUTS])
def test_norms_count_every_element_once(layout: str, ranks: Callable[[int], RankPool]) -> None:
    """The ratios of LAMB and LARS would hide a factor that both of their norms have."""
    for found in ranks(ranks_of(layout)).run(norms, layout):
        for name, pair in found.items():
            expected = drawn("value", name).norm().item(), 3 * drawn("1", name).norm().item()
            assert pair == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize("settings", [LAMB, LARS, MUON, *VARIANTS], ids=shown)
def test_whole_parameters_follow_the_papers(settings: dict[str, Any]) -> None:
    root = modules(LAYERS)
    optimizer = optimizer_of(root, settings)
    for step, rate in enumerate(RATES, start=1):
        give_gradients(root, step)
        assert set(optimizer.gradients()) == set(SHAPES)
        optimizer.step(rate)
        assert all(p.grad is None for p in root.parameters())
    for name, value in reference(settings).items():
        torch.testing.assert_close(root.get_parameter(name).detach(), value, atol=1e-11, rtol=1e-11, msg=name)


# layouts that vitpar itself makes


def vit(mesh: str | None, device: torch.device) -> Any:
    """A tiny ViT in float64: this rank's part under `mesh`, or all of it."""
    from vitpar import Execution, model_config, parallelize, parse, validate
    from vitpar.models.initial import initialise
    from vitpar.models.vit import ViT

    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2, "num_classes": 3}
    config = model_config("vit_custom", **sizes, layer_scale=0.1, qk_norm=True, init="perturbed")
    if mesh is None:
        model = ViT(config).double()
        initialise(model, 0, config)
        return model
    plan = validate(parse(mesh), config, 8)
    return parallelize(config, plan, Execution(8, precision="fp64"), device)


def vit_trained(device: torch.device, mesh: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The ViT's whole parameters after steps with random gradients; runs on every rank."""
    model = vit(mesh, device)
    optimizer = ShardedOptimizer(model.named_parameters(), section(settings), heads=2)
    for step, rate in enumerate(RATES):
        for name, p in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{step}/{name}".encode()))
            p.grad = like(torch.randn(p.shape, generator=generator, dtype=torch.float64), p)
        optimizer.step(rate)
    return {name: whole(p).numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("settings", [LAMB, LARS, MUON], ids=shown)
@pytest.mark.parametrize("mesh", ["tp2xfsdp2", "pp2xtp2", "dp2"])
def test_a_parallel_vit_equals_a_whole_one(
    mesh: str, settings: dict[str, Any], ranks: Callable[[int], RankPool]
) -> None:
    expected = vit_trained(torch.device("cpu"), None, settings)
    seen = set()
    for found in ranks(2 if mesh == "dp2" else 4).run(vit_trained, mesh, settings):
        seen |= set(found)
        for name, value in found.items():
            pair = torch.from_numpy(value), torch.from_numpy(expected[name])
            torch.testing.assert_close(*pair, atol=1e-11, rtol=1e-11, msg=name)
    assert seen == set(expected)


def through_backward(device: torch.device | None, settings: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Rows of the first matrix held here, and the whole parameters after steps with gradients that autograd makes.

    device: None for plain modules.
    """
    layers = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Tanh(), nn.Linear(2, 4, bias=False)).double()
    names = ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight")
    generator = torch.Generator().manual_seed(0)
    for p in layers.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    if device is not None:
        fully_shard(layers, mesh=init_device_mesh("cpu", (3,)))
    named = list(zip(names, layers.parameters(), strict=True))
    rows = [p.to_local().shape[0] for _, p in named if isinstance(p, DTensor)]
    optimizer = ShardedOptimizer(named, section(settings))
    for rate in RATES:
        layers(x).square().sum().backward()
        assert set(optimizer.gradients()) == {name for name, p in named if not isinstance(p, DTensor) or rows_of(p)}
        optimizer.step(rate)
    return rows, {name: whole(p).numpy() for name, p in named}


def rows_of(p: DTensor) -> int:
    return p.to_local().shape[0]


@pytest.mark.parametrize("settings", [LAMB, LARS, MUON], ids=shown)
def test_ranks_with_an_empty_shard_take_part(settings: dict[str, Any], ranks: Callable[[int], RankPool]) -> None:
    _, expected = through_backward(None, settings)
    found = ranks(3).run(through_backward, settings)
    assert [rows[0] for rows, _ in found] == [1, 1, 0]
    for _, values in found:
        for name, value in values.items():
            pair = torch.from_numpy(value), torch.from_numpy(expected[name])
            torch.testing.assert_close(*pair, atol=1e-11, rtol=1e-11)


# what is sent


def sent(device: torch.device, layout: str, settings: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Return what a step of the optimizer sends, and the number of block matrices on this rank; runs on every rank."""
    root = built(layout)
    optimizer = optimizer_of(root, settings)
    give_gradients(root, 1)
    with Sent() as counted:
        optimizer.step(0.1)
    return dict(counted.counts), sum(n.startswith("blocks.") and p.dim() == 2 for n, p in root.named_parameters())


@pytest.mark.parametrize(
    ("layout", "messages"),
    [("fsdp2", 1), ("pp2xfsdp2", 1), ("dp2xfsdp2", 1), ("tp2", 1), ("tp2xfsdp2", 2), ("two tensor axes", 2)],
)
@pytest.mark.parametrize("settings", [LAMB, LARS], ids=shown)
def test_norms_are_one_message_for_each_group_of_ranks(
    layout: str, messages: int, settings: dict[str, Any], ranks: Callable[[int], RankPool]
) -> None:
    for counts, _ in ranks(ranks_of(layout)).run(sent, layout, settings):
        assert counts == {"all_reduce": messages}


def test_muon_gathers_every_matrix_once(ranks: Callable[[int], RankPool]) -> None:
    for counts, matrices in ranks(2).run(sent, "fsdp2", MUON):
        assert counts == {"all_gather": matrices} and matrices == 8


# each optimizer on whole parameters


@pytest.mark.parametrize("settings", [LAMB, LARS, MUON], ids=shown)
def test_parameters_without_gradient_are_left_alone(settings: dict[str, Any]) -> None:
    root = modules(LAYERS)
    optimizer = optimizer_of(root, settings)
    idle = {"blocks.0.attn.proj.weight", "blocks.1.norm1.weight"}
    for step, rate in enumerate(RATES, start=1):
        give_gradients(root, step)
        for name in idle:
            root.get_parameter(name).grad = None
        optimizer.step(rate)
    for name, value in reference(settings).items():
        expected = drawn("value", name) if name in idle else value
        torch.testing.assert_close(root.get_parameter(name).detach(), expected, atol=1e-11, rtol=1e-11, msg=name)
    optimizer.step(0.1)  # without any gradient


@pytest.mark.parametrize("settings", [LAMB, LARS], ids=shown)
def test_where_a_norm_is_zero_the_step_is_not_scaled(settings: dict[str, Any]) -> None:
    p = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = ShardedOptimizer([("head.fc.weight", p)], section(settings))
    p.grad = torch.ones_like(p)
    optimizer.step(0.1)
    torch.testing.assert_close(p.detach(), torch.full_like(p, -0.1), atol=1e-6, rtol=0)
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    optimizer = ShardedOptimizer([("head.fc.weight", p)], section({**settings, "weight_decay": 0.0}))
    p.grad = torch.zeros_like(p)
    optimizer.step(0.1)
    assert torch.equal(p, torch.ones_like(p))


@pytest.mark.parametrize(
    ("settings", "matrix", "other"),
    [
        (LAMB, {"step", "exp_avg", "exp_avg_sq"}, {"step", "exp_avg", "exp_avg_sq"}),
        (LARS, {"momentum_buffer"}, {"momentum_buffer"}),
        ({**LARS, "momentum": 0.0}, set(), set()),
        (MUON, {"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}),
    ],
    ids=lambda value: shown(value) if isinstance(value, dict) else "",
)
def test_state_is_flat_and_by_parameter(settings: dict[str, Any], matrix: set[str], other: set[str]) -> None:
    pairs = [("blocks.0.mlp.fc1.weight", nn.Parameter(torch.ones(3, 2))), ("head.fc.weight", nn.Linear(2, 2).weight)]
    optimizer = ShardedOptimizer(pairs, section(settings))
    for _, p in pairs:
        p.grad = torch.ones_like(p)
    optimizer.step(0.1)
    shards = [p for group in optimizer.torch_optimizer.param_groups for p in group["params"]]
    states = [optimizer.torch_optimizer.state[shard] for shard in shards]
    assert [set(state) for state in states] == [matrix, other]
    for shard, state in zip(shards, states, strict=True):
        assert all(key == "step" or value.shape == shard.shape for key, value in state.items())
