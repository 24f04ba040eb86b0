"""A Swin Transformer under a plan, with timm's weights: logits and gradients equal timm's, without our one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.foreign_models import timm_swin
from helpers.foreign_weights import saved
from helpers.ranks import RankPool
from helpers.swin_plans import TINY
from vitpar import Execution, load_weights, model_config, parallelize, parse, validate
from vitpar.models.swin.config import SwinConfig
from vitpar.weights.folder import open_weights
from vitpar.weights.importing import import_weights

BATCH = 8
IMAGES = torch.randn(BATCH, 3, TINY["image_size"], TINY["image_size"], dtype=torch.float64)
LABELS = torch.arange(BATCH) % TINY["num_classes"]
PLANS = (
    "pp2xtp2",
    "fsdp2xtp2+sp",
    "tp4+2d",
    "pp2: stage1=dp2, stage2=tp2+sp, *=fsdp2+ckpt",
    "tp8+3d",
)


def under_plan(
    device: torch.device, mesh: str, folder: Path, images: Tensor
) -> tuple[list[int], Tensor | None, dict[str, Tensor]]:
    """Return the rows of this rank's logits, the logits, and gradients, complete and by name; runs on every rank."""
    config = open_weights(folder).config
    plan = validate(parse(mesh), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, precision="fp64"), device)
    load_weights(model, folder)
    mine = images[model.image_rows(BATCH)] if model.takes_images else None
    logits = model.predict(mine, BATCH)
    model.forward_backward(mine, LABELS)
    complete = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        complete[name] = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
    rows = model.output_rows(BATCH) if model.gives_outputs else []
    return rows, logits, complete


def gradients_of(theirs: nn.Module, folder: Path, config: dict) -> dict[str, Tensor]:
    """Return timm's gradients under vitpar's names, in float32, by importing them as if they were weights."""
    grads = {name: p.grad.float() for name, p in theirs.named_parameters()}
    import_weights(saved(folder, grads, config), folder / "imported")
    weights = open_weights(folder / "imported")
    return {
        f"{layer}.{key}": weights.read(f"{layer}.{key}")
        for layer, d in weights.config.layers.items()
        for key in d.parameters
    }


@pytest.mark.parametrize("mesh", PLANS)
def test_logits_and_gradients_under_a_plan_equal_timms(
    mesh: str, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    config = model_config("swin_custom", **{**TINY, "drop_path": 0.0})
    assert isinstance(config, SwinConfig)
    theirs = timm_swin(config)
    side = config.image_size
    beside = {"architecture": "swin_tiny_patch4_window7_224", "pretrained_cfg": {"input_size": [3, side, side]}}
    weights = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    imported = import_weights(saved(tmp_path / "there", weights, beside), tmp_path / "imported")
    assert replace(imported.config, name=config.name) == config
    expected = theirs.double()(IMAGES)
    F.cross_entropy(expected, LABELS).backward()
    gradients = gradients_of(theirs, tmp_path / "gradients", beside)
    size, seen, held = parse(mesh).world_size, set(), set()
    for rows, logits, found in ranks(size).run(under_plan, mesh, tmp_path / "imported", IMAGES):
        if logits is not None:
            seen.update(rows)
            torch.testing.assert_close(logits, expected[rows].detach(), atol=1e-10, rtol=1e-10)
        held |= found.keys()
        for name, gradient in found.items():
            error = (gradient.float() - gradients[name]).abs().max().item()
            assert error <= 1e-6 * max(1e-3, gradients[name].abs().max().item()), name  # these are rounded to float32
    assert seen == set(range(BATCH))
    assert held == gradients.keys()
