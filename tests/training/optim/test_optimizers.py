"""Optimizers: against torch and timm, norms of shards, communication, and state. Plans are in `helpers.plans`."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from helpers.collectives import Sent
from helpers.modern_vits import modern_config
from helpers.oracles import timm
from helpers.ranks import Ranks
from vitpar import Execution, ParallelModel, model_config, parallelize, parse, validate
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.recipe import read_recipe
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.sharded import local
from vitpar.training.optim.muon import orthogonalise
from vitpar.training.optim.norms import WholeNorms
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.optim.state_memory import moments

RATES = (0.1, 0.03, 0.2, 0.05)

ADAM = {"name": "adam", "betas": (0.8, 0.9), "eps": 1e-6}
LION = {"name": "lion", "betas": (0.8, 0.9)}
LAMB = {"name": "lamb", "betas": (0.8, 0.9), "eps": 1e-6}
LARS = {"name": "lars", "momentum": 0.7, "trust_coefficient": 0.5}
ADAFACTOR = {"name": "adafactor"}
MUON = {"name": "muon", "betas": (0.8, 0.9), "momentum": 0.9}


def shown(settings: dict[str, Any] | str) -> str:
    if isinstance(settings, str):
        return settings
    return " ".join(f"{key}={value}" for key, value in settings.items() if key not in ("betas", "eps"))


def section(settings: Mapping[str, Any]) -> OptimizerSection:
    return OptimizerSection(**{"weight_decay": 0.3, **settings})


DECAYING: tuple[dict[str, Any], ...] = tuple(
    {**settings, "layer_decay": 0.5} for settings in (LAMB, LARS, MUON, ADAFACTOR)
)
NANO = {"model.name": "vit_nano_patch4_16"}
# Over 3 ranks fsdp divides no dim evenly.
CONFIG = model_config(
    "vit_custom",
    **{"image_size": 8, "patch_size": 4, "embed_dim": 8, "num_heads": 4, "depth": 2, "mlp_hidden_dim": 4},
    **{"num_classes": 3, "init": "perturbed"},
)


def optimizer_of(named: Iterable[tuple[str, nn.Parameter]], settings: Mapping[str, Any]) -> ShardedOptimizer:
    matrices, above = CONFIG.hidden_matrices, CONFIG.layers_above
    return ShardedOptimizer(list(named), section(settings), matrices=matrices, layers_above=above)


def one_process() -> LayeredModel:
    model = LayeredModel(CONFIG).double()
    initialise(model, 0, CONFIG)
    return model


def built(mesh: str) -> ParallelModel:
    """Return this rank's part of the model; collective."""
    return parallelize(CONFIG, validate(parse(mesh), CONFIG, 12), Execution(12, precision="fp64"), torch.device("cpu"))


def give_gradients(model: nn.Module | ParallelModel, step: int) -> None:
    """Set gradients that are sharded as the parameters are."""
    for _, p in model.named_parameters():
        p.grad = (10 * step * p.detach()).sin()


def norm_of_whole(tensor: Tensor) -> float:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).norm().item()


def norms(device: torch.device, mesh: str) -> list[tuple[str, list[float], list[float]]]:
    """Return each parameter with its norm and 3 times that of its gradient: found and expected; runs on every rank."""
    model = built(mesh)
    give_gradients(model, 1)
    named = dict(model.named_parameters())
    values = [local(p.detach()) for p in named.values()], [3 * local(p.grad) for p in named.values()]
    found = WholeNorms(list(named.values()))(*values).T.tolist()
    expected = [[norm_of_whole(p.detach()), 3 * norm_of_whole(p.grad)] for p in named.values()]
    return list(zip(named, found, expected, strict=True))


@pytest.mark.parametrize("mesh", ["fsdp2", "tp2xfsdp2", "dp2xfsdp2", "tp4+2d"])
def test_norms_count_every_element_once(mesh: str, ranks: Ranks) -> None:
    """Norms of sharded and replicated parameters equal those of the complete tensors.

    LAMB and LARS use the ratio of two norms, which hides a factor that both norms share.
    """
    for answers in ranks(parse(mesh).world_size).run(norms, mesh):
        for name, found, expected in answers:
            assert found == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize("settings", [LAMB, LARS, MUON, ADAFACTOR], ids=shown)
def test_parameters_without_a_gradient_do_not_change(settings: dict[str, Any]) -> None:
    model, before = one_process(), dict(one_process().named_parameters())
    optimizer = optimizer_of(model.named_parameters(), settings)
    idle = {"blocks.0.attn.proj.weight", "blocks.1.norm1.weight"}
    give_gradients(model, 1)
    for name in idle:
        model.get_parameter(name).grad = None
    assert set(optimizer.gradients()) == set(before) - idle
    optimizer.step(0.1)
    optimizer.step(0.1)  # without any gradient
    assert all(p.grad is None for p in model.parameters())
    assert {name for name, p in model.named_parameters() if torch.equal(p, before[name])} == idle


@pytest.mark.parametrize("settings", [LION, LAMB, LARS, MUON, ADAFACTOR], ids=shown)
def test_weight_decay_can_be_set_between_steps(settings: dict[str, Any]) -> None:
    """It reaches the parameters that decay, also after 0, and no others."""
    found = []
    for first, later in ((0.3, ()), (0.0, (0.3,))):
        model = one_process()
        optimizer = optimizer_of(model.named_parameters(), {**settings, "weight_decay": first})
        for decay in later:
            optimizer.set_weight_decay(decay)
        for step, rate in enumerate(RATES, start=1):
            give_gradients(model, step)
            optimizer.step(rate)
        found.append(dict(model.named_parameters()))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


# communication


def sent(device: torch.device, mesh: str, settings: dict[str, Any]) -> dict[str, int]:
    """Return the collectives of one optimizer step; runs on every rank."""
    model = built(mesh)
    optimizer = optimizer_of(model.named_parameters(), settings)
    give_gradients(model, 1)
    with Sent() as counted:
        optimizer.step(0.1)
    return dict(counted.counts)


@pytest.mark.parametrize(
    ("settings", "mesh", "messages"),
    [
        *((LAMB, mesh, {"all_reduce": 1}) for mesh in ("pp2xfsdp2", "dp2xfsdp2", "tp2")),
        *((DECAYING[1], mesh, {"all_reduce": n}) for mesh, n in (("fsdp2", 1), ("tp2xfsdp2", 2), ("tp4+2d", 2))),
        *((DECAYING[3], mesh, {"all_reduce": 3}) for mesh in ("fsdp2", "tp2")),
        (MUON, "fsdp2", {"all_gather": 8}),  # matrices of blocks; the classifier and vectors use AdamW
    ],
    ids=str,
)
def test_norms_and_matrices_take_few_messages_per_process_group(
    settings: dict[str, Any], mesh: str, messages: dict[str, int], ranks: Ranks
) -> None:
    """One message per parameter would cost latency in every step."""
    for counts in ranks(parse(mesh).world_size).run(sent, mesh, settings):
        assert counts == messages


# unsharded parameters


@pytest.mark.parametrize("settings", [LAMB, LARS], ids=shown)
def test_zero_norm_disables_the_trust_ratio(settings: dict[str, Any]) -> None:
    """A ratio with a zero norm would freeze the parameter or divide by zero."""
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


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "lamb", "lars", "adafactor"])
def test_estimate_counts_the_numbers_of_the_state(name: str) -> None:
    """Adafactor keeps a number for each row and column, also of positions and patches, and one for each of a vector."""
    frozen = {"train.freeze": "embed, 0, *.fc1.weight"} if name == "adafactor" else {}
    recipe = read_recipe(None, {"data.path": "x", "train.steps": 1, "optimizer.name": name, **NANO, **frozen})
    config = recipe.config(10)
    parameters = dict(LayeredModel(config).named_parameters())
    for one, p in parameters.items():
        p.requires_grad_(one not in recipe.frozen(config))
    optimizer = ShardedOptimizer(parameters.items(), recipe.optimizer)
    optimizer.allocate()
    kept = sum(value.numel() for key, value in optimizer.state().items() if not key.startswith("step."))
    assert kept / sum(p.numel() for p in parameters.values() if p.requires_grad) == moments(recipe, config)


NAMES = ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc1.bias", "blocks.0.norm1.weight", "head.fc.weight")


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 4), (6,), (4,), (3, 2, 4, 5))
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    drawn[2] *= 1e-4  # smaller than what steps of Adafactor are relative to
    return [nn.Parameter(x) for x in drawn]


@pytest.mark.parametrize("decay", [0.3, 0.0])
@pytest.mark.parametrize(
    "settings",
    [
        *(ADAM, LION, ADAFACTOR, LAMB, LARS, {**LARS, "nesterov": True}, {**LARS, "momentum": 0.0}),
        *({**ADAM, "name": "adamw", "implementation": how} for how in ("auto", "fused", "for-loop")),
        *({"name": "sgd", "implementation": how} for how in ("auto", "fused", "for-loop")),
        *({"name": "sgd", "momentum": 0.9, "nesterov": nesterov} for nesterov in (False, True)),
    ],
    ids=shown,
)
def test_updates_match_torch_and_timm(settings: dict[str, Any], decay: float) -> None:
    """With `always_adapt` for matrices, timm's LAMB and LARS equal vitpar's.

    By default timm skips the trust ratio without weight decay; vitpar follows the papers and always applies it to
    matrices.
    """
    mine, theirs = parameters(), parameters()
    chosen = section({**settings, "weight_decay": decay})
    ours = ShardedOptimizer(zip(NAMES, mine, strict=True), chosen)
    matrices = [p for name, p in zip(NAMES, theirs, strict=True) if "fc" in name and "weight" in name]
    others = [p for p in theirs if all(p is not matrix for matrix in matrices)]
    groups = [
        {"params": matrices, "weight_decay": decay, "always_adapt": True},
        {"params": others, "weight_decay": 0.0, "always_adapt": False},
    ]
    adam: dict[str, Any] = {"betas": chosen.betas, "eps": chosen.eps}
    momentum: dict[str, Any] = {"momentum": chosen.momentum, "nesterov": chosen.nesterov}
    other: torch.optim.Optimizer
    match chosen.name:
        case "adam":
            other = torch.optim.Adam(groups, **adam)
        case "adamw":
            other = torch.optim.AdamW(groups, **adam)
        case "sgd":
            other = torch.optim.SGD(groups, **momentum)
        case "lion":
            other = timm.optim.Lion(groups, betas=chosen.betas)
        case "adafactor":
            other = torch.optim.Adafactor(groups)
        case "lamb":
            other = timm.optim.Lamb(groups, max_grad_norm=None, **adam)
        case _:
            other = timm.optim.Lars(groups, trust_coeff=chosen.trust_coefficient, eps=0.0, **momentum)
    for step, rate in enumerate((*RATES, 0.9)):  # Adafactor limits the last rate
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad *= step > 0 or p.dim() == 1  # the first gradients of matrices are zero
            q.grad = p.grad.clone()
        for group in other.param_groups:
            group["lr"] = rate
        ours.step(rate)
        other.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("exact", "tolerance"), [(True, 1e-13), (False, 0.03)])
@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9)])
@pytest.mark.parametrize("options", [{}, {"nesterov": False}, {"adjust_lr_fn": "original"}, {"ns_steps": 3}], ids=str)
def test_muon_matches_torch(
    options: dict[str, Any], shape: tuple[int, int], exact: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch runs the iteration in bfloat16 on every device (and casts with `to` since 2.15). Without the cast both
    # agree to the last digits.
    if exact:
        real = torch.Tensor.to
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: x.clone() if "copy" in k else real(x, *a, **k))
    chosen = section({"name": "muon", **options})
    mine, theirs = (nn.Parameter(torch.ones(shape, dtype=torch.float64)) for _ in range(2))
    ours = ShardedOptimizer([("proj.weight", mine)], chosen, matrices={"proj.weight": ()})
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
def test_orthogonalise_moves_singular_values_near_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    result = orthogonalise(1e-4 * matrices, 5)
    assert (result.shape, result.dtype) == (matrices.shape, dtype)
    for matrix, whitened in zip(matrices.view(-1, *shape[-2:]), result.view(-1, *shape[-2:]), strict=True):
        u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
        values = u.mT @ whitened.double() @ v.mT  # diagonal if the singular vectors are unchanged
        off = values - values.diagonal().diag()
        assert values.diagonal().min() > 0.5 and values.diagonal().max() < 1.3
        assert off.abs().max() < (0.1 if dtype is torch.bfloat16 else 1e-3)
    assert not orthogonalise(torch.zeros(shape, dtype=dtype), 5).any()


def test_maps_are_orthogonalised_separately() -> None:
    """A large key gradient does not change the update of queries and values, although one parameter holds all three."""
    name, moved = "blocks.0.attn.qkv.weight", []
    for factor in (1.0, 1e6):
        before = torch.randn(36, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        p = nn.Parameter(before.clone())
        p.grad = before.sin()
        p.grad.view(4, 3, 3, 12)[:, 1] *= factor  # rows are ordered (head, q|k|v, feature)
        ShardedOptimizer([(name, p)], section(MUON), matrices={name: (3, 3, 3)}).step(0.1)
        moved.append(p.detach() - before)
    torch.testing.assert_close(*moved, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    ("parts", "weight", "rows"),
    [
        ("eva02_base", "blocks.0.mlp.fc1.weight", slice(0, None, 2)),  # gates, which alternate with values
        (
            "vit_22b",
            "blocks.0.in_proj.weight",
            [20 * head + 12 + i for head in range(12) for i in range(8)],
        ),  # the MLP's
    ],
)
def test_stacked_maps_of_modern_models_are_orthogonalised_separately(parts: str, weight: str, rows: Any) -> None:
    config = modern_config(parts)
    p = nn.Parameter(torch.zeros(config.layers["blocks.0"].parameters[weight.removeprefix("blocks.0.")]).double())
    p.grad = torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone = orthogonalise((1 - 0.95**2) * p.grad[rows], 5)
    chosen = section({"name": "muon", "weight_decay": 0.0, "momentum": 0.95})
    ShardedOptimizer([(weight, p)], chosen, matrices=config.hidden_matrices).step(1.0)
    factor = 0.2 * max(alone.shape) ** 0.5
    torch.testing.assert_close(p.detach()[rows], -factor * alone, atol=1e-9, rtol=1e-9)
