"""EMA of the parameters: its warm-up matches timm's, and the training step applies it."""

import pytest
import torch
from torch import nn

from helpers.oracles import timm
from vitpar import Execution, ViTConfig, model_config, parallelize, parse, validate
from vitpar.recipe import read_recipe
from vitpar.training.build import build
from vitpar.training.optim.average import EMA

BATCH, CPU = 8, torch.device("cpu")
VALUES = {"data.path": "x", "train.steps": 9, "train.batch_size": BATCH}


def config_of() -> ViTConfig:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 3}
    return model_config("vit_custom", **sizes)


@pytest.mark.parametrize(("decay", "warmup"), [(0.9, False), (0.9, True), (0.3, True)])
def test_ema_matches_timm(decay: float, warmup: bool, alone: None) -> None:
    """The average equals timm's ModelEmaV3 after every update, with and without the decay warm-up.

    Without a warm-up timm's trainer, unlike vitpar, starts from the parameters after the first step.
    """
    config = config_of()
    plan = validate(parse("dp1"), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, precision="fp64"), CPU)
    theirs = nn.ParameterList(p.detach().clone() for _, p in model.named_parameters())
    average = timm.utils.ModelEmaV3(theirs, decay=decay, use_warmup=warmup)
    ours = EMA(model, decay, warmup)
    for step in range(1, 40):
        for (_, p), q in zip(model.named_parameters(), theirs, strict=True):
            p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64))
            q.data.copy_(p.data)
        ours.update(step)
        average.update(theirs, step=step if warmup else None)
        for mine, other in zip(ours.average.values(), average.module, strict=True):
            torch.testing.assert_close(mine, other.detach(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("warmup", "decay"), [(True, 0.75), (False, 0.9)])
def test_ema_warmup_setting_reaches_the_training_step(warmup: bool, decay: float, alone: None) -> None:
    """A training step uses the warmed-up decay, which after update 8 is 1 - 8^(-2/3) = 0.75."""
    settings = {"train.ema_decay": 0.9, "train.ema_warmup": warmup, "train.precision": "fp32"}
    recipe = read_recipe(None, {**VALUES, **settings})
    config = config_of()
    parts = build(recipe, config, validate(parse("dp1"), config, BATCH), CPU)
    assert parts.ema is not None
    before = {name: average.clone() for name, average in parts.ema.average.items()}
    parts.step()(8, 0.1, torch.randn(BATCH, 3, 8, 8), torch.arange(BATCH) % 3, torch.arange(BATCH))
    for name, p in parts.model.named_parameters():
        expected = decay * before[name] + (1 - decay) * p.detach()
        torch.testing.assert_close(parts.ema.average[name], expected, atol=1e-6, rtol=1e-5)
