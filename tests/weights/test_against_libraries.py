"""Imported weights compared with the libraries they come from: logits and every parameter's gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.foreign_models import timm_model, transformers_model
from helpers.foreign_weights import (
    CLASSES,
    HEADS,
    TIMM_CONFIG,
    as_transformers,
    saved,
    timm_state,
    transformers_config,
)
from helpers.imported import IMAGES, model_of
from helpers.oracles import transformers
from vitpar.training.recipe import read_recipe
from vitpar.weights.importing import ImportedWeights, import_weights

LABELS = torch.arange(len(IMAGES)) % CLASSES
TIMM: dict[str, tuple[dict[str, Any], str]] = {
    "class token": ({}, "cls"),
    "positions of patches alone": ({"embed_prefix": False, "registers": 4}, "cls"),
    "registers": ({"registers": 2}, "cls"),
    "distilled": ({"dist": True}, "cls"),
    "qk_norm and layer scale": ({"qk_norm": True, "layer_scale": True}, "cls"),
    "average pooling": ({"cls": False}, "avg"),
    "average pooling with a class token": ({"registers": 1}, "avg"),
}


def gradients_of(model: nn.Module, folder: Path, config: dict[str, Any] | None) -> dict[str, Tensor]:
    """Return the gradients of `model` under vitpar's names, in float32, by importing them as if they were weights."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    import_weights(saved(folder, {name: g.float() for name, g in found.items()}, config), folder / "imported")
    return dict(model_of(folder / "imported").named_parameters())


def assert_equal(model: nn.Module, folder: Path, config: dict[str, Any] | None) -> ImportedWeights:
    """Import the weights of `model`, and check that both models have equal logits and gradients in float64."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    imported = import_weights(saved(folder / "weights", weights, config), folder / "imported")
    ours, theirs = model_of(folder / "imported").double(), model.double()
    logits, output = ours(IMAGES.double()), theirs(IMAGES.double())
    expected = getattr(output, "logits", output)
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=1e-10)
    for computed in (logits, expected):
        F.cross_entropy(computed, LABELS).backward()
    gradients = gradients_of(theirs, folder / "gradients", config)
    for name, parameter in ours.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        error = (found.float() - gradients[name]).abs().max().item()
        assert error <= 1e-6 * max(1e-3, found.abs().max().item()), name  # the saved ones are rounded to float32
    assert sum(parameter.grad is not None for parameter in ours.parameters()) > 20
    return imported


@pytest.mark.parametrize("case", TIMM)
def test_timm_weights_give_equal_gradients(case: str, tmp_path: Path) -> None:
    options, pool = TIMM[case]
    config = TIMM_CONFIG | {"global_pool": {"cls": "token"}.get(pool, pool)}
    # The shapes of qk_norm imply the number of heads; otherwise only the configuration has it.
    imported = assert_equal(timm_model(timm_state(**options), pool), tmp_path, None if "qk_norm" in options else config)
    assert imported.format == "timm" and (imported.config.num_heads, imported.config.pool) == (HEADS, pool)


@pytest.mark.parametrize(("kind", "teacher"), [("vit", False), ("deit", False), ("deit", True)])
@pytest.mark.parametrize("eps", [1e-12, 1e-6])
def test_transformers_weights_give_equal_gradients(eps: float, kind: str, teacher: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers_model(kind, teacher, layer_norm_eps=eps)
    with torch.no_grad():
        for parameter in model.parameters():  # initial biases and norms are constants, which would hide mistakes
            parameter.normal_(std=0.3)
    imported = assert_equal(model, tmp_path, transformers_config(kind, layer_norm_eps=eps))
    assert imported.format == "transformers" and imported.config.distillation is teacher
    assert read_recipe(tmp_path / "imported" / "recipe.toml", {"data.path": "x"}).config(CLASSES).norm_eps == eps


@pytest.mark.parametrize("kind", ["vit", "deit"])
def test_missing_layer_norm_eps_takes_transformers_default(kind: str, tmp_path: Path) -> None:
    config = transformers_config(kind)
    del config["layer_norm_eps"]
    default = transformers.AutoConfig.for_model(kind).layer_norm_eps
    state = as_transformers(timm_state(dist=kind == "deit"), kind)
    told = import_weights(saved(tmp_path / "there", state, config), tmp_path / "here").config
    assert told.norm_eps == default == 1e-12
