"""LAMB, LARS and Muon: sharded parameters end as whole ones do in a plain loop over one process."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from collectives import Sent
from ranks import RankPool
from sharded_parameters import (
    HEAD_DIM,
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
from vitpar.train.muon import orthogonalise
from vitpar.train.optimizer import ShardedOptimizer, decays, local
from vitpar.train.optimizer_section import OptimizerSection
from vitpar.train.whole_norms import WholeNorms

RATES = (0.1, 0.03, 0.2, 0.05)

LAMB = {"name": "lamb", "betas": (0.8, 0.9), "eps": 1e-6}
LARS = {"name": "lars", "momentum": 0.7, "trust_coefficient": 0.5}
MUON = {"name": "muon", "betas": (0.8, 0.9), "momentum": 0.9}
VARIANTS: tuple[dict[str, Any], ...] = (
    {**LARS, "nesterov": True},
    {**LARS, "momentum": 0.0},
    {**MUON, "nesterov": False},
    {**MUON, "adjust_lr_fn": "original"},
    {**MUON, "ns_steps": 2},
)


def shown(settings: dict[str, Any] | str) -> str:
    if isinstance(settings, str):
        return settings
    return " ".join(f"{key}={value}" for key, value in settings.items() if key not in ("betas", "eps"))


def section(settings: Mapping[str, Any]) -> OptimizerSection:
    return OptimizerSection(**{"weight_decay": 0.3, **settings})


# the same on one process, by the papers' formulas


def reference(settings: dict[str, Any], rates: tuple[float, ...] = RATES) -> dict[str, Tensor]:
    """All parameters after one step for each of `rates`."""
    chosen = section(settings)
    parameters = {name: drawn("value", name) for name in SHAPES}
    for name, x in parameters.items():
        memory: dict[str, Tensor] = {"m": torch.zeros_like(x), "v": torch.zeros_like(x)}
        decay = chosen.weight_decay if decays(name) else 0.0
        for t, rate in enumerate(rates, start=1):
            gradient = drawn(str(t), name)
            if chosen.name == "lamb":
                step = adam(memory, gradient, t, chosen) + decay * x
                ratio = x.norm() / step.norm() if decays(name) else 1.0
                x -= rate * ratio * step
            elif chosen.name == "lars":
                norms = x.norm(), gradient.norm()
                ratio = chosen.trust_coefficient * norms[0] / (norms[1] + decay * norms[0]) if decays(name) else 1.0
                scaled = ratio * (gradient + decay * x)
                memory["m"] = chosen.momentum * memory["m"] + scaled
                x -= rate * (scaled + chosen.momentum * memory["m"] if chosen.nesterov else memory["m"])
            elif not (name.startswith("blocks.") and x.dim() == 2):
                step = adam(memory, gradient, t, chosen) + decay * x
                x -= rate * step
            else:
                mu = chosen.momentum
                memory["m"] = mu * memory["m"] + (1 - mu) * gradient
                step = mu * memory["m"] + (1 - mu) * gradient if chosen.nesterov else memory["m"]
                x *= 1 - rate * decay
                for rows in rows_of_maps(name):
                    original = max(1.0, len(rows) / x.shape[1]) ** 0.5
                    factor = original if chosen.adjust_lr_fn == "original" else 0.2 * max(len(rows), x.shape[1]) ** 0.5
                    x[rows] -= rate * factor * orthogonal(step[rows], chosen.ns_steps)
    return parameters


def adam(memory: dict[str, Tensor], gradient: Tensor, t: int, settings: OptimizerSection) -> Tensor:
    one, two = settings.betas
    memory["m"] = one * memory["m"] + (1 - one) * gradient
    memory["v"] = two * memory["v"] + (1 - two) * gradient**2
    return (memory["m"] / (1 - one**t)) / ((memory["v"] / (1 - two**t)).sqrt() + settings.eps)


def rows_of_maps(name: str) -> list[list[int]]:
    """The rows of each linear map in a matrix: three in qkv, whose heads follow one another."""
    if not name.endswith("qkv.weight"):
        return [list(range(SHAPES[name][0]))]
    heads = [3 * HEAD_DIM * head for head in range(HEADS)]
    return [[start + HEAD_DIM * part + i for start in heads for i in range(HEAD_DIM)] for part in range(3)]


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Newton-Schulz with the powers applied to the singular values themselves."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


# sharded


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
    from vitpar import model_config, parallelize, parse, validate
    from vitpar.models.initial import initialise
    from vitpar.models.vit import ViT

    sizes = {"image_size": 8, "patch_size": 4, "width": 12, "depth": 2, "heads": 2, "num_classes": 3}
    config = model_config("vit_custom", **sizes, layer_scale=0.1, qk_norm=True)
    if mesh is None:
        model = ViT(config).double()
        initialise(model, 0, config)
        return model
    plan = validate(parse(mesh), config, 8)
    return parallelize(config, plan, batch_size=8, device=device, precision_name="fp64")


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
    """What a step of the optimizer sends, and the matrices of blocks here; runs on every rank."""
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


@pytest.mark.parametrize(("exact", "tolerance"), [(True, 1e-13), (False, 0.03)])
@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9)])
@pytest.mark.parametrize("options", [{}, {"nesterov": False}, {"adjust_lr_fn": "original"}, {"ns_steps": 3}], ids=str)
def test_muon_equals_torchs(
    options: dict[str, Any], shape: tuple[int, int], exact: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if exact:  # torch's iterates in bfloat16 everywhere
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    chosen = section({"name": "muon", **options})
    mine, theirs = (nn.Parameter(torch.ones(shape, dtype=torch.float64)) for _ in range(2))
    ours = ShardedOptimizer([("blocks.0.attn.proj.weight", mine)], chosen)
    torchs = torch.optim.Muon(
        [theirs],
        weight_decay=0.3,
        momentum=chosen.momentum,
        nesterov=chosen.nesterov,
        ns_steps=chosen.ns_steps,
        adjust_lr_fn=chosen.adjust_lr_fn,
    )
    for rate in RATES:
        mine.grad = torch.randn(shape, dtype=torch.float64)
        theirs.grad = mine.grad.clone()
        torchs.param_groups[0]["lr"] = rate
        torchs.step()
        ours.step(rate)
    torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)
    assert (mine != 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 8), (30, 10), (10, 30), (3, 10, 30)])
def test_singular_values_become_about_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    result = orthogonalise(1e-4 * matrices, 5)
    assert (result.shape, result.dtype) == (matrices.shape, dtype)
    for matrix, whitened in zip(matrices.view(-1, *shape[-2:]), result.view(-1, *shape[-2:]), strict=True):
        u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
        values = u.mT @ whitened.double() @ v.mT  # diagonal, if the singular vectors are the same
        off = values - values.diagonal().diag()
        assert values.diagonal().min() > 0.5 and values.diagonal().max() < 1.3
        assert off.abs().max() < (0.1 if dtype is torch.bfloat16 else 1e-3)
    assert not orthogonalise(torch.zeros(shape, dtype=dtype), 5).any()


def test_queries_keys_and_values_are_matrices_of_their_own() -> None:
    """A large gradient of the keys leaves the step of queries and values as it is."""
    name, rows = "blocks.0.attn.qkv.weight", rows_of_maps("blocks.0.attn.qkv.weight")
    moved = []
    for factor in (1.0, 1e6):
        p = nn.Parameter(drawn("value", name))
        p.grad = drawn("1", name)
        p.grad[rows[1]] *= factor
        ShardedOptimizer([(name, p)], section(MUON), heads=HEADS).step(0.1)
        moved.append(p.detach() - drawn("value", name))
    torch.testing.assert_close(*moved, atol=1e-12, rtol=1e-9)
    p.grad = drawn("1", name)
    with pytest.raises(AssertionError, match=r"queries, keys and values of blocks\.0\.attn\.qkv\.weight"):
        ShardedOptimizer([(name, p)], section(MUON))


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
