"""Optimizer settings of a recipe: defaults, settings without effect, and the optimizer state."""

from pathlib import Path

import pytest
import torch
from torch import nn

from vitpar.errors import RecipeError
from vitpar.training.optim.optimizer import ShardedOptimizer, state_bytes, state_words
from vitpar.training.recipe import Recipe, read_recipe
from vitpar.training.recipe.sections import OptimizerSection


def read(*assignments: str) -> Recipe:
    return read_recipe(None, {"data.path": "x", "train.steps": 1}, assignments)


def test_defaults_depend_on_the_optimizer() -> None:
    muon, lars, lamb, sgd = (read(f"optimizer.name={name}").optimizer for name in ("muon", "lars", "lamb", "sgd"))
    assert (muon.momentum, muon.nesterov, muon.ns_steps, muon.adjust_lr_fn) == (0.95, True, 5, "match_rms_adamw")
    assert (lars.momentum, lars.nesterov, lars.trust_coefficient) == (0.9, False, 0.001)
    assert (lamb.betas, lamb.eps) == ((0.9, 0.999), 1e-6)
    assert (sgd.momentum, sgd.nesterov) == (0.0, False)
    given = read("optimizer.name=muon", "optimizer.momentum=0.5", "optimizer.nesterov=false").optimizer
    assert (given.momentum, given.nesterov) == (0.5, False)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lars", "muon"])
def test_written_recipe_has_only_settings_the_optimizer_uses(name: str, tmp_path: Path) -> None:
    recipe, file = read(f"optimizer.name={name}"), tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    assert read_recipe(file) == recipe
    assert ("momentum" in file.read_text()) == (name in ("sgd", "lars", "muon"))
    if name == "adamw":
        assert read_recipe(file, {}, ["optimizer.name=muon"]).optimizer.momentum == 0.95


REFUSED = [
    (["name=lamb", "momentum=0.9"], r"optimizer\.momentum is 0\.9, which lamb does not use: leave it out"),
    (["name=lars", "betas=[0.8,0.9]"], r"optimizer\.betas is \(0\.8, 0\.9\), which lars does not use"),
    (["name=lars", "ns_steps=3"], r"optimizer\.ns_steps is 3, which lars does not use"),
    (["name=muon", "trust_coefficient=1.0"], r"optimizer\.trust_coefficient is 1\.0, which muon does not use"),
    (["name=adamw", "nesterov=true"], r"optimizer\.nesterov is True, which adamw does not use"),
    (["name=sgd", "adjust_lr_fn=original"], r"optimizer\.adjust_lr_fn is 'original', which sgd does not use"),
    (["name=sgd", "nesterov=true"], r"momentum is 0: set optimizer\.momentum, or nesterov to false"),
    (["name=muon", "momentum=0.0"], r"momentum is 0: set optimizer\.momentum, or nesterov to false"),
    (["name=lamb", "implementation=fused"], r"'fused', which lamb does not support: use 'foreach' or 'auto'"),
    (["name=muon", "implementation=for-loop"], r"'for-loop', which muon does not support: use 'foreach' or 'auto'"),
    (["name=lamb", "implementation=triton"], r"'triton', which lamb does not support: use 'foreach' or 'auto'"),
    (["name=sgd", "implementation=triton"], r"'triton', which sgd does not support: use 'fused' or 'auto'"),
    (["name=muon", "adjust_lr_fn=rms"], r"recipe key 'optimizer\.adjust_lr_fn' is 'rms'"),
    (["name=muon", "ns_steps=0"], r"recipe key 'optimizer\.ns_steps' is 0"),
    (["name=lion"], r"recipe key 'optimizer\.name' is 'lion'"),
]


@pytest.mark.parametrize(("assignments", "sentence"), REFUSED, ids=lambda value: " ".join(value)[:40])
def test_settings_without_effect_are_refused(assignments: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence) as caught:
        read(*(f"optimizer.{assignment}" for assignment in assignments))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["lamb", "lars", "muon"])
def test_foreach_implementation_is_accepted(name: str) -> None:
    assert read(f"optimizer.name={name}", "optimizer.implementation=foreach").optimizer.implementation == "foreach"


def test_nesterov_sgd_matches_torch() -> None:
    mine, theirs = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    settings = OptimizerSection(name="sgd", weight_decay=0.3, momentum=0.9, nesterov=True)
    ours = ShardedOptimizer([("head.fc.weight", mine)], settings)
    torchs = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.3)
    for _ in range(3):
        mine.grad = torch.randn_like(mine)
        theirs.grad = mine.grad.clone()
        ours.step(0.1)
        torchs.step()
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("assignments", "numbers", "words"),
    [
        (["name=adamw"], 4, "parameters, gradients, adamw state in float32"),
        (["name=lamb"], 4, "parameters, gradients, lamb state in float32"),
        (["name=lars"], 3, "parameters, gradients, lars state in float32"),
        (["name=lars", "momentum=0.0"], 2, "parameters, gradients in float32"),
        (["name=muon"], 4, "parameters, gradients, muon state (at most) in float32"),
    ],
)
def test_state_bytes_and_description_per_optimizer(assignments: list[str], numbers: int, words: str) -> None:
    recipe = read("train.precision=fp32", *(f"optimizer.{assignment}" for assignment in assignments))
    assert state_bytes(recipe) == 4 * numbers
    assert state_words(recipe) == words
