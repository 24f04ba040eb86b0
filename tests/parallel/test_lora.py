"""Adapters under plans: gradients and SGD steps are those of weights W + alpha / rank · B A in one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from helpers.ranks import RankPool
from helpers.sharded_parameters import whole
from helpers.swin_plans import TINY
from helpers.text_models import TokenLoss, bert, t5
from vitpar import Execution, model_config, parallelize, parse, validate
from vitpar.models.config import ModelConfig
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel, zero_sides
from vitpar.models.lora import LoRA, adapted
from vitpar.models.loss import CrossEntropy, Loss
from vitpar.strategy import Plan
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.recipe import read_recipe
from vitpar.training.recipe.sections import OptimizerSection

BATCH, STEPS, LR, RANK = 8, 3, 0.3, 3
BASE = {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 4, "num_classes": 4}
VIT = model_config("vit_custom", **BASE, init="perturbed")
SWIN = model_config("swin_custom", **{**TINY, "drop_path": 0.0}, init="perturbed")
BERT, T5 = bert(init="perturbed"), t5(init="perturbed")
PARALLEL = model_config("vit_custom", **BASE, parallel_blocks=True, activation="swiglu", init="perturbed")
CUBE = replace(VIT, embed_dim=32, depth=2, mlp_hidden_dim=64)
ZERO_BUBBLE = {"virtual_stages": 2, "microbatches": 4}

slow = pytest.mark.slow
CASES: tuple[Any, ...] = (
    (VIT, "dp2", {}, {}),
    (VIT, "dp2+zero1", {"targets": ("qkv", "blocks.[01].mlp.fc2")}, {"microbatches": 2}),
    (VIT, "fsdp4", {}, {"microbatches": 2}),
    (VIT, "tp2xfsdp2+ckpt", {}, {}),
    (VIT, "tp4", {"train": "head, *.bias, *.norm1.*"}, {}),
    (VIT, "tp4+sp", {"train": "head, *.bias, *.norm1.*"}, {"microbatches": 2}),
    (VIT, "tp4+2d", {"train": ""}, {}),
    (VIT, "tp2xdp2+ckpt.selective", {}, {}),
    (VIT, "pp2xtp2", {}, {"schedule": "1f1b"}),
    (VIT, "pp2xfsdp2", {}, {"schedule": "interleavedzerobubble", **ZERO_BUBBLE}),
    (VIT, "pp2xtp2", {}, {"schedule": "zbvzerobubble", **ZERO_BUBBLE}),
    (VIT, "pp2: embed=fsdp2, 0-1=tp2+sp, 2=dp2+zero2, *=fsdp2", {}, {}),
    (CUBE, "tp8+3d", {}, {}),
    pytest.param(CUBE, "tp8+2.5d", {"train": "head, *.bias"}, {}, marks=slow),
    (SWIN, "tp2+sp", {}, {}),
    (BERT, "tp2", {"targets": ("qkv", "proj", "dense")}, {}),
    (T5, "tp2+sp", {}, {}),
    (PARALLEL, "tp2", {}, {}),
)
"""Model, strategy, settings of [lora], and settings of the plan."""


def ids(value: object) -> str:
    return value.name if isinstance(value, ModelConfig) else str(value)


def with_adapters(config: ModelConfig, lora: dict[str, Any]) -> tuple[LoRA, frozenset[str]]:
    """Return the model with adapters, none of whose gradients is zero, and what is frozen."""
    given = {f"lora.{name}": value for name, value in {"rank": RANK, "alpha": 5, **lora}.items()}
    recipe = read_recipe(None, {"data.path": "x", "train.steps": 1, **given})
    made = adapted(config, RANK, 5.0, recipe.lora.targets).perturbed
    return made, recipe.frozen(made)


def loss_of(config: ModelConfig) -> Loss:
    return TokenLoss() if len(config.output_shape) > 1 else CrossEntropy()


def batches(config: ModelConfig) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    generator, drawn = torch.Generator().manual_seed(0), []
    ids_of = partial(torch.randint, config.output_shape[-1], generator=generator)
    for _ in range(STEPS):
        x = torch.randn(BATCH, *config.input.shape, generator=generator, dtype=torch.float64)
        x = x if config.input.dtype is None else ids_of(size=(BATCH, *config.input.shape))
        sides = {name: ids_of(size=side.shape) for name, side in zero_sides(config, BATCH, "cpu").items()}
        sides = {n: torch.ones_like(s) if "mask" in n else s % 2 if "type" in n else s for n, s in sides.items()}
        drawn.append((x, ids_of(size=(BATCH, *config.output_shape[:-1])), sides))
    return drawn


def plan_of(config: ModelConfig, mesh: str, settings: dict[str, Any]) -> Plan:
    return validate(replace(parse(mesh), **settings), config, BATCH)


def trained(
    device: torch.device, config: ModelConfig, mesh: str, lora: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return gradients of the first of STEPS steps of SGD, parameters after them, and what is kept; on every rank."""
    made, frozen = with_adapters(config, lora)
    execution = Execution(BATCH, precision="fp64", frozen=frozen)
    model = parallelize(made, plan_of(made, mesh, settings), execution, device, loss_of(config))
    sgd = OptimizerSection(name="sgd", lr=LR, weight_decay=0, momentum=0.5)
    optimizer, gradients = ShardedOptimizer(model.named_parameters(), sgd), {}
    for number, (x, labels, sides) in enumerate(batches(config)):
        model.forward_backward(x[model.image_rows(BATCH)] if model.takes_images else None, labels, **sides)
        if number == 0:
            named = model.named_parameters()
            gradients = {n: None if p.grad is None else whole(p.grad).numpy().copy() for n, p in named}
        optimizer.step(LR)
    messages = sum(size for _, size in model.gradient_messages)
    return {
        "gradients": gradients,
        "parameters": {name: whole(p).numpy() for name, p in model.named_parameters()},
        "state": {name.split(".", 1)[1] for name in optimizer.state()},
        "message": messages,
    }


def one_process(config: ModelConfig, lora: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return gradients and parameters of the plain model, with weights that are computed from adapters."""
    made, frozen = with_adapters(config, lora)
    filled, model = LayeredModel(made).double(), LayeredModel(config).double()
    initialise(filled, 0, made)
    initialise(model, 0, config)  # fills buffers
    model.tie()
    parameters = {name: p.detach().requires_grad_(name not in frozen) for name, p in filled.named_parameters()}
    mine = {name: p for name, p in parameters.items() if p.requires_grad}
    optimizer = torch.optim.SGD(mine.values(), lr=LR, momentum=0.5)
    gradients: dict[str, Tensor] = {}
    for x, labels, sides in batches(config):
        computed = {name: p for name, p in parameters.items() if ".lora_" not in name}
        for module in made.modules:
            a, b = (parameters[f"{module}.lora_{end}.weight"] for end in "AB")
            computed[f"{module}.weight"] = computed[f"{module}.weight"] + 5.0 / RANK * b @ a
        outputs = functional_call(model, {n: p for n, p in computed.items() if n not in config.shared}, (x,), sides)
        loss = torch.nn.functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in mine.items() if p.grad is not None}
        optimizer.step()
    assert gradients.keys() == mine.keys()
    return gradients, {name: p.detach() for name, p in parameters.items()}


@pytest.mark.parametrize(("config", "mesh", "lora", "settings"), CASES, ids=ids)
def test_adapters_train_as_complete_weights_do_in_one_process(
    config: ModelConfig, mesh: str, lora: dict[str, Any], settings: dict[str, Any], ranks: Callable[[int], RankPool]
) -> None:
    """Only adapters and what `lora.train` names have gradients, state and messages; all else stays as it is."""
    gradients, parameters = one_process(config, lora)
    begun = LayeredModel(made := with_adapters(config, lora)[0]).double()
    initialise(begun, 0, made)
    begin, seen = dict(begun.named_parameters()), set()
    for found in ranks(plan_of(made, mesh, settings).world_size).run(trained, config, mesh, lora, settings):
        seen |= found["parameters"].keys()
        assert found["state"] <= gradients.keys()
        for name, value in found["parameters"].items():
            mine, gradient = torch.from_numpy(value), found["gradients"][name]
            assert (gradient is not None) == (name in gradients), name
            torch.testing.assert_close(mine, parameters[name], atol=1e-10, rtol=1e-8, msg=name)
            if gradient is None:
                assert torch.equal(mine, begin[name]), name
            else:
                torch.testing.assert_close(torch.from_numpy(gradient), gradients[name], atol=1e-11, rtol=1e-8, msg=name)
        if mesh == "dp2":
            assert found["message"] == 8 * sum(gradient.numel() for gradient in gradients.values())
    assert seen == parameters.keys()
