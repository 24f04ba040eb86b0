"""Plans of MAE, BERT and T5 that have every pair of features of the support matrix, against one process."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.parity import skip_what_cannot_run
from helpers.ranks import RankPool
from helpers.support_matrix import covering, ranks_of, smallest_plan
from vitpar import parse, validate
from vitpar.check import CheckResult, check_plan, recipe_to_check
from vitpar.models.config import ModelConfig
from vitpar.strategy.support import DIMENSIONS, splits
from vitpar.tasks import Task, task_of
from vitpar.training.recipe import Recipe

VOCABULARY = 67
"""Prime, so that parts of the vocabulary differ."""
BLOCKS = {"embed_dim": 64, "num_heads": 4, "mlp_hidden_dim": 128}
"""Sizes of blocks. float8 needs shards whose sizes are multiples of 16."""
DECODER = {f"decoder_{name}": size for name, size in BLOCKS.items()} | {"decoder_depth": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mae": ("mae", {"patch_size": 4, "image_size": 16, "depth": 3, "options": DECODER}),
    "bert": ("mlm", {"depth": 4, "dropout": 0.1}),
    "t5": ("span", {"depth": 2, "decoder_depth": 2, "head_dim": 16, "dropout": 0.1}),
}
"""Task and further options of each model."""


def setting_of(name: str, precision: str, batch: int) -> tuple[Recipe, ModelConfig, Task]:
    """Return recipe, configuration and task of a model."""
    task, options = MODELS[name]
    given = {"task.name": task, "model.name": f"{name}_custom", "train.batch_size": batch, "train.precision": precision}
    given |= {f"model.{key}": value for key, value in (BLOCKS | options).items()}
    # Adam moves an element by the sign of its gradient, which near zero is only rounding.
    given |= {"optimizer.name": "sgd"} | ({"train.fp8_min_features": 0} if precision == "fp8" else {})
    recipe = recipe_to_check(given)
    trained = task_of(recipe, VOCABULARY)
    return recipe, recipe.config(trained.outputs, trained.model_options), trained


def check_choice(device: torch.device, name: str, choice: tuple[str, ...]) -> CheckResult:
    """Check the smallest plan with these features; runs on every rank."""
    *chosen, precision = choice
    mesh, fields = smallest_plan(*chosen)
    batch = 16 * parse(mesh).data_parallel
    recipe, config, task = setting_of(name, precision, batch)
    plan = validate(replace(parse(mesh), **fields), config, batch)
    return check_plan(recipe, config, plan, device, task, sgd_steps=1, recipe_steps=1)


def choices_of(name: str) -> Iterator[Any]:
    """Yield test parameters of a model: 12 plans of at most 4 ranks in the slow tests, and all in soak."""
    config = setting_of(name, "fp32", 16)[1]
    able = {tensor for tensor in DIMENSIONS["tensor"] if splits(config, tensor)}
    few = covering(lambda choice: choice[1] in able and ranks_of(choice) <= 4, most=12)
    every = covering(lambda choice: choice[1] in able)
    assert len(few) == 12 and len(every) >= 40
    for choice in dict.fromkeys([*few, *every]):
        marks = [pytest.mark.slow] * (choice in few) + [pytest.mark.soak] * (choice in every)
        yield pytest.param(name, choice, marks=marks, id=f"{name} {' '.join(choice)}")


@pytest.mark.parametrize(("name", "choice"), [case for name in MODELS for case in choices_of(name)])
def test_every_pair_of_features_matches_one_process(
    name: str, choice: tuple[str, ...], ranks: Callable[[int], RankPool]
) -> None:
    skip_what_cannot_run(choice[-1])
    results = ranks(ranks_of(choice)).run(check_choice, name, choice)
    assert all(result.passed for result in results), results[0].worst
    assert len({str(result) for result in results}) == 1, "ranks disagree about the result"
