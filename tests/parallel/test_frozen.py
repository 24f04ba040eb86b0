"""Frozen parameters: gradients, updates and state under plans equal one process with torch.optim; they stay."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.ranks import RankPool
from helpers.sharded_parameters import whole
from helpers.swin_plans import TINY
from vitpar import Execution, model_config, parallelize, parse, validate
from vitpar.models.config import ModelConfig
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.strategy import Plan
from vitpar.strategy.freezing import listed_parameters
from vitpar.training.optim.average import EMA
from vitpar.training.optim.optimizer import ShardedOptimizer, decays
from vitpar.training.recipe.sections import OptimizerSection
from vitpar.training.step import TrainStep

BATCH, STEPS, LR, CLIP, EMA_DECAY = 8, 3, 0.02, 0.5, 0.9
ADAMW = OptimizerSection(eps=1e-4, weight_decay=0.1)
VIT = model_config(
    "vit_custom",
    **{"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 4, "num_classes": 4},
    layer_scale=0.1,
    init="perturbed",
)
SWIN = model_config("swin_custom", **{**TINY, "drop_path": 0.0}, init="perturbed")

PROBE, LOWER, MIDDLE, HEAD, EMBED = "embed, *", "embed, 0-1", "1-2", "2-3, head", "embed"
BITFIT, NORMS = "embed, *, !*.bias", "embed, 0, blocks.*, head, !blocks.[23].norm?.*"
CASES: tuple[tuple[ModelConfig, str, str, dict[str, Any]], ...] = (
    (VIT, "dp2", PROBE, {}),
    (VIT, "dp2+zero1", LOWER, {}),
    (VIT, "dp2+zero2", MIDDLE, {"microbatches": 2}),
    (VIT, "fsdp4", PROBE, {}),
    (VIT, "fsdp4+ckpt", LOWER, {"microbatches": 2}),
    (VIT, "tp2xfsdp2+ckpt.selective", MIDDLE, {}),
    (VIT, "tp4+sp", LOWER, {}),
    (VIT, "tp4+2d", MIDDLE, {}),
    (VIT, "tp2", HEAD, {}),
    (VIT, "pp2xtp2", PROBE, {"schedule": "1f1b"}),
    (VIT, "pp2xfsdp2", PROBE, {"schedule": "gpipe"}),
    (VIT, "pp2xdp2", MIDDLE, {"schedule": "1f1b"}),
    (VIT, "pp4", LOWER, {"schedule": "1f1b"}),
    (VIT, "pp2", LOWER, {"schedule": "interleaved1f1b", "virtual_stages": 2, "microbatches": 4}),
    (VIT, "pp2xfsdp2", HEAD, {"schedule": "interleavedzerobubble", "virtual_stages": 2, "microbatches": 4}),
    (VIT, "pp2", LOWER, {"schedule": "interleavedzerobubble", "virtual_stages": 2, "microbatches": 4}),
    (VIT, "pp2", "embed, 0", {"schedule": "zbvzerobubble", "virtual_stages": 2, "microbatches": 4}),
    (VIT, "pp2xfsdp2", PROBE, {"schedule": "dualpipev", "virtual_stages": 2, "microbatches": 4}),
    (VIT, "pp2: embed=fsdp2, 0-1=tp2, 2=dp2+zero1, *=fsdp2", LOWER, {}),
    (VIT, "dp2", BITFIT, {}),
    (VIT, "tp2xfsdp2", BITFIT, {"microbatches": 2}),
    (VIT, "tp4+sp", NORMS, {}),
    (VIT, "tp4+2d", BITFIT, {}),
    (VIT, "tp2xdp2+zero1", "*.weight", {}),
    (VIT, "pp2xdp2", NORMS, {"schedule": "interleavedzerobubble", "virtual_stages": 2, "microbatches": 4}),
    (VIT, "pp2xfsdp2", BITFIT, {"schedule": "zbvzerobubble", "virtual_stages": 2, "microbatches": 4}),
    (SWIN, "tp2+sp", "embed, *, !*.relative_position_bias_table, !*.bias", {}),
    (SWIN, "tp2+sp", "embed, stage1", {}),
    (SWIN, "pp2: stage1=dp2, stage2=tp2, *=fsdp2", "embed, stage1, stage2", {}),
)
"""Model, strategy, what is frozen, and settings of the plan."""


def ids(value: object) -> str:
    return value.name if isinstance(value, ModelConfig) else str(value)


def frozen_of(config: ModelConfig, freeze: str) -> frozenset[str]:
    return listed_parameters(freeze, config)


def is_frozen(name: str, frozen: frozenset[str]) -> bool:
    return name in frozen


def batches(config: ModelConfig) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    size = (BATCH, config.channels, config.image_size, config.image_size)
    return [
        (
            torch.randn(size, generator=generator, dtype=torch.float64),
            torch.randint(config.num_classes, (BATCH,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def plan_of(config: ModelConfig, mesh: str, settings: dict[str, Any]) -> Plan:
    return validate(replace(parse(mesh), **settings), config, BATCH)


def trained(
    device: torch.device, config: ModelConfig, mesh: str, freeze: str, settings: dict[str, Any], precision: str
) -> dict[str, Any]:
    """Return gradients of the first of STEPS steps, and parameters, averages and state after them; on every rank."""
    frozen = frozen_of(config, freeze)
    execution = Execution(BATCH, precision=precision, frozen=frozen)
    model = parallelize(config, plan_of(config, mesh, settings), execution, device)
    begin = {name: whole(p).clone() for name, p in model.named_parameters()}
    optimizer, ema = ShardedOptimizer(model.named_parameters(), ADAMW), EMA(model, EMA_DECAY)
    gradients: dict[str, Any] = {}

    def keep(number: int) -> None:
        if number == 1:
            named = model.named_parameters()
            gradients.update({n: None if p.grad is None else whole(p.grad).double().numpy().copy() for n, p in named})

    step, norms = TrainStep(model, optimizer, clip_grad_norm=CLIP, ema=ema, after_gradients=keep), []
    for number, (images, labels) in enumerate(batches(config), start=1):
        mine = images[model.image_rows(BATCH)] if model.takes_images else None
        norms.append(step(number, LR, mine, labels).norm.item())
    named = dict(model.named_parameters())
    unchanged = {n for n, p in named.items() if torch.equal(whole(p), begin[n])}
    with ema.averaged():
        averages = {name: whole(p).numpy().copy() for name, p in named.items()}
    return {
        "gradients": gradients,
        "parameters": {name: whole(p).numpy() for name, p in named.items()},
        "averages": averages,
        "unchanged": unchanged,
        "state": {name.split(".", 1)[1] for name in optimizer.state()},
        "norms": norms,
    }


def one_process(config: ModelConfig, freeze: str) -> dict[str, Any]:
    """Return the same of the plain model with torch.optim.AdamW and torch's clipping."""
    frozen = frozen_of(config, freeze)
    model = LayeredModel(config).double()
    initialise(model, 0, config)
    named = dict(model.named_parameters())
    mine = {name: p for name, p in named.items() if not is_frozen(name, frozen)}
    groups = [
        {"params": [p for p in mine.values() if decays(p) is decay], "weight_decay": 0.1 * decay}
        for decay in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=1e-4, foreach=False)
    averages, gradients, norms = {name: p.detach().clone() for name, p in named.items()}, {}, []
    for images, labels in batches(config):
        loss = F.cross_entropy(model(images), labels)
        found = torch.autograd.grad(loss, list(mine.values()))
        for p, gradient in zip(mine.values(), found, strict=True):
            p.grad = gradient
        gradients = gradients or {name: gradient.clone() for name, gradient in zip(mine, found, strict=True)}
        norms.append(torch.nn.utils.clip_grad_norm_(mine.values(), CLIP).item())
        optimizer.step()
        for name, p in named.items():
            averages[name].lerp_(p.detach(), 1 - EMA_DECAY)
    parameters = {name: p.detach() for name, p in named.items()}
    return {"gradients": gradients, "parameters": parameters, "averages": averages, "norms": norms}


@pytest.mark.parametrize(("config", "mesh", "freeze", "settings"), CASES, ids=ids)
def test_training_under_a_plan_equals_one_process(
    config: ModelConfig, mesh: str, freeze: str, settings: dict[str, Any], ranks: Callable[[int], RankPool]
) -> None:
    """Every trained parameter has its gradient and update; frozen ones have neither, no state, and do not change."""
    frozen, expected, seen = frozen_of(config, freeze), one_process(config, freeze), set()
    size = plan_of(config, mesh, settings).world_size
    for found in ranks(size).run(trained, config, mesh, freeze, settings, "fp64"):
        seen |= found["parameters"].keys()
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        for name, value in found["parameters"].items():
            fixed = is_frozen(name, frozen)
            assert (found["gradients"][name] is None) == fixed, name
            assert (name in found["unchanged"]) == fixed, name
            assert name not in found["state"] or not fixed, name
            pairs = [(value, expected["parameters"][name]), (found["averages"][name], expected["averages"][name])]
            pairs += [] if fixed else [(found["gradients"][name], expected["gradients"][name])]
            for mine, right in pairs:
                torch.testing.assert_close(torch.from_numpy(mine), right, atol=1e-9, rtol=1e-7, msg=name)
    assert seen == expected["parameters"].keys()
