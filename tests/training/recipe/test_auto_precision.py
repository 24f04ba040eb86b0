"""`train.precision = "auto"`: the precision chosen for each device, and the checks on settings that depend on it."""

from typing import Any

import pytest
import torch

from vitpar.errors import RecipeError
from vitpar.training.recipe import Recipe, read_recipe
from vitpar.training.recipe.machine import automatic_precision, replace_auto_precision


def recipe(**train: Any) -> Recipe:
    return Recipe.model_validate({"data": {"path": "x"}, "train": {"steps": 1, **train}})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list of compute capabilities that stands for this machine's devices; the test fills it."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found[index])
    return found


@pytest.mark.parametrize(
    ("capabilities", "name"),
    [([(8, 0)], "bf16"), ([(9, 0)] * 8, "bf16"), ([(12, 0)], "bf16"), ([(7, 5)], "fp32"), ([(8, 0), (7, 0)], "fp32")],
)
def test_auto_precision_is_bf16_only_on_gpus_that_compute_in_it(
    gpus: list[tuple[int, int]], capabilities: list[tuple[int, int]], name: str
) -> None:
    gpus += capabilities
    found = replace_auto_precision(recipe(), "cuda")
    assert (found.train.precision, found.train.steps) == (name, 1)
    assert replace_auto_precision(found, "cpu") is found
    assert replace_auto_precision(recipe(precision="fp16"), "cuda").train.precision == "fp16"
    assert replace_auto_precision(recipe(), "cpu").train.precision == "fp32"


def test_settings_without_effect_are_refused_before_and_after_resolution(gpus: list[tuple[int, int]]) -> None:
    gpus.append((8, 0))
    reduced = recipe(reduce_dtype="bf16")
    assert replace_auto_precision(reduced, "cuda").train.reduce_dtype == "bf16"
    with pytest.raises(RecipeError, match=r"reduce_dtype is 'bf16', which does nothing with train.precision 'fp32'"):
        replace_auto_precision(reduced, "cpu")
    for words in ("train.reduce_dtype=fp16", "loss_scale.hysteresis=1"):
        with pytest.raises(RecipeError, match=r"with train.precision 'auto'|train.precision 'auto' does not support"):
            read_recipe(None, {"data.path": "x", "train.steps": 1}, [words])


def test_planning_uses_the_profiled_precision() -> None:
    rows = {(None, "cuda"): "fp32", ("bf16", "cuda"): "bf16", ("fp32", "cuda"): "fp32", ("bf16", "cpu"): "fp32"}
    assert {given: automatic_precision(*given) for given in rows} == rows
