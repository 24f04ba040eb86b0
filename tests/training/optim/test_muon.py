"""Muon on unsharded matrices: agreement with torch.optim.Muon, orthogonalisation, separate steps for Q, K and V."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.modern_vits import modern_config
from helpers.optimizer_references import MUON, RATES, rows_of_maps, section
from helpers.sharded_parameters import STACKED, drawn
from vitpar.training.optim.muon import orthogonalise
from vitpar.training.optim.optimizer import ShardedOptimizer


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


def test_query_key_and_value_are_orthogonalised_separately() -> None:
    """A large key gradient does not change the update of queries and values, although one parameter holds all three."""
    name, rows = "blocks.0.attn.qkv.weight", rows_of_maps("blocks.0.attn.qkv.weight")
    moved = []
    for factor in (1.0, 1e6):
        p = nn.Parameter(drawn("value", name))
        p.grad = drawn("1", name)
        p.grad[rows[1]] *= factor
        ShardedOptimizer([(name, p)], section(MUON), matrices={name: STACKED}).step(0.1)
        moved.append(p.detach() - drawn("value", name))
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
