"""Optimizer settings of a recipe: defaults, settings without effect, and the optimizer state."""

from pathlib import Path

import pytest

from vitpar.errors import RecipeError
from vitpar.training.optim.state_memory import state_bytes, state_words
from vitpar.training.recipe import Recipe, read_recipe


def read(*assignments: str) -> Recipe:
    return read_recipe(None, {"data.path": "x", "train.steps": 1}, assignments)


def test_defaults_depend_on_the_optimizer(tmp_path: Path) -> None:
    names = "muon", "lars", "lamb", "sgd", "lion", "adam", "adafactor"
    muon, lars, lamb, sgd, lion, adam, adafactor = (read(f"optimizer.name={name}").optimizer for name in names)
    assert (muon.momentum, muon.nesterov, muon.ns_steps, muon.adjust_lr_fn) == (0.95, True, 5, "match_rms_adamw")
    assert (lars.momentum, lars.nesterov, lars.trust_coefficient) == (0.9, False, 0.001)
    assert (lamb.betas, lamb.eps) == ((0.9, 0.999), 1e-6)
    assert (sgd.momentum, sgd.nesterov) == (0.0, False)
    assert (lion.lr, lion.betas, lion.weight_decay) == (1e-4, (0.9, 0.99), 0.05)
    assert (adam.lr, adam.betas, adam.weight_decay) == (1e-3, (0.9, 0.999), 0.0)
    assert (adafactor.lr, adafactor.weight_decay) == (1e-2, 0.0)
    given = read("optimizer.name=muon", "optimizer.momentum=0.5", "optimizer.nesterov=false").optimizer
    assert (given.momentum, given.nesterov) == (0.5, False)
    file = tmp_path / "recipe.toml"
    for name in (*names, "adamw"):
        more = () if name in ("sgd", "adam", "adamw") else ("optimizer.implementation=foreach",)
        file.write_text((recipe := read(f"optimizer.name={name}", *more)).to_toml())
        assert read_recipe(file) == recipe
        assert ("momentum" in file.read_text()) == (name in ("sgd", "lars", "muon"))
    assert read_recipe(file, {}, ["optimizer.name=muon"]).optimizer.momentum == 0.95


def test_state_bytes_and_description_per_optimizer() -> None:
    for name, momentum, numbers, state in (
        ("adamw", None, 4, ", adamw state"),
        ("adam", None, 4, ", adam state"),
        ("lion", None, 3, ", lion state"),
        ("lamb", None, 4, ", lamb state"),
        ("lars", None, 3, ", lars state"),
        ("lars", 0.0, 2, ""),
        ("muon", None, 4, ", muon state (at most)"),
    ):
        recipe = read("train.precision=fp32", f"optimizer.name={name}", *([] if momentum is None else [LITTLE]))
        assert state_bytes(recipe, recipe.config(10)) == 4 * numbers, name
        assert state_words(recipe) == f"parameters, gradients{state} in float32"
    assert ", adafactor state (about) in" in state_words(read("optimizer.name=adafactor", "train.precision=fp32"))


LITTLE = "optimizer.momentum=0.0"
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
    (["name=lion", "eps=1.0"], r"optimizer\.eps is 1\.0, which lion does not use: leave it out"),
    (["name=lion", "implementation=fused"], r"'fused', which lion does not support: use 'foreach' or 'auto'"),
    (["name=adam", "implementation=triton"], r"'triton', which adam does not support: use 'fused' or 'auto'"),
    (["name=adafactor", "betas=[0.8,0.9]"], r"optimizer\.betas is \(0\.8, 0\.9\), which adafactor does not use"),
    (["name=rprop"], r"recipe key 'optimizer\.name' is 'rprop'"),
]


def test_settings_without_effect_are_refused() -> None:
    for assignments, sentence in REFUSED:
        with pytest.raises(RecipeError, match=sentence) as caught:
            read(*(f"optimizer.{assignment}" for assignment in assignments))
        assert "\n" not in str(caught.value)
