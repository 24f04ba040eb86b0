"""Optimizers and weight decay, compared with the implementations of torch and timm."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.optimizer_references import ADAFACTOR, ADAM, LAMB, LARS, LION, RATES, section, shown
from helpers.oracles import timm
from vitpar import model_config
from vitpar.models.layers import LayeredModel
from vitpar.training.optim.optimizer import ShardedOptimizer, decays

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
    [ADAM, LION, ADAFACTOR, LAMB, LARS, {**LARS, "nesterov": True}, {**LARS, "momentum": 0.0}],
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


def test_weight_decay_covers_the_same_parameters_as_in_timm() -> None:
    """Compare by size, because the libraries name parameters differently. The ViT has every kind of parameter."""
    options = {"image_size": 8, "patch_size": 4, "depth": 1, "num_classes": 5, "qk_norm": True, "layer_scale": 0.1}
    ours = LayeredModel(model_config("vit_custom", embed_dim=12, num_heads=2, num_reg_tokens=3, **options))
    theirs: Any = timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, depth=1, num_classes=5, qk_norm=True, init_values=0.1,
        embed_dim=12, num_heads=2, reg_tokens=3,
    )  # fmt: skip
    left_out = theirs.no_weight_decay()
    groups = timm.optim.param_groups_weight_decay(theirs, 0.1, no_weight_decay_list=left_out)
    expected = sorted(p.numel() for group in groups if group["weight_decay"] for p in group["params"])
    assert sorted(p.numel() for p in ours.parameters() if decays(p)) == expected
