"""Check of one `helpers.plans.Case` against one process."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch

import vitpar.check.plan
from helpers.modern_vits import modern_config
from helpers.plans import TINY_SWIN, Case
from helpers.shared_models import Relative, Tied
from vitpar import model_config, parse, validate
from vitpar.check import CheckResult, check_plan, recipe_to_check
from vitpar.models.config import ModelConfig
from vitpar.models.lora import adapted
from vitpar.parallel import Communication
from vitpar.parallel.float8 import float8_fault
from vitpar.recipe import Recipe
from vitpar.strategy import Plan
from vitpar.tasks import Task, task_of


def skip_what_cannot_run(precision: str) -> None:
    """Skip a test in fp8 if this build of torch has no row-scaled float8 matmul on CPUs."""
    if precision == "fp8" and (fault := float8_fault(torch.device("cpu"))):
        pytest.skip(f"torch {torch.__version__}: {fault}")


KEYS = {
    "precision": "train.precision",
    "reduce_dtype": "train.reduce_dtype",
    "label_smoothing": "train.label_smoothing",
    "compile_blocks": "train.compile",
    "activation_memory_budget": "train.activation_memory_budget",
    "optimizer": "optimizer.implementation",
}


def recipe_of(
    batch_size: int,
    communication: Communication = Communication(),
    model: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Recipe:
    """Return the recipe of a check.

    model: fields of the recipe's [model]
    settings: names in `KEYS`, or recipe keys with `__` for the dot
    """
    options = {KEYS.get(name, name.replace("__", ".")): value for name, value in settings.items()}
    if options.get("train.precision") == "fp8":
        options.setdefault("train.fp8_min_features", 0)  # models of tests are small
    options |= {f"communication.{name}": value for name, value in vars(communication).items()}
    options |= {f"model.{name}": value for name, value in model.items()}
    return recipe_to_check({"train.batch_size": batch_size, **options})


VOCABULARY = 67
"""Number of token ids. It is prime, so that parts of the vocabulary differ."""
MAE_SIZES = {"patch_size": 4, "image_size": 16, "embed_dim": 24, "depth": 3, "num_heads": 4, "mlp_hidden_dim": 40}
MAE_DECODER = {"decoder_embed_dim": 16, "decoder_depth": 2, "decoder_num_heads": 4, "decoder_mlp_hidden_dim": 24}
TEXT_SIZES = {"embed_dim": 48, "num_heads": 12, "mlp_hidden_dim": 64, "dropout": 0.1}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "MAE": ("mae", {"name": "mae_custom", **MAE_SIZES, "options": MAE_DECODER}),
    "BERT": ("mlm", {"name": "bert_custom", **TEXT_SIZES, "depth": 4}),
    "T5": ("span", {"name": "t5_custom", **TEXT_SIZES, "head_dim": 4, "depth": 2, "decoder_depth": 3}),
}
"""Task and model of the families that do not classify."""


def _vit(case: Case) -> ModelConfig:
    return model_config(
        "vit_nano_patch4_16",
        **{"image_size": 8, "num_classes": 10, "depth": case.depth, "drop_path": 0.1, **case.model},
    )


BUILDERS: dict[str, Callable[[Case], ModelConfig]] = {
    **dict.fromkeys(("ViT", "frozen", "LoRA"), _vit),
    "modern ViT": lambda case: modern_config(case.parts, **case.model),
    "Swin": lambda case: model_config("swin_custom", **{**TINY_SWIN, **case.model}),
    "tied": lambda case: Tied(),
    "relative": lambda case: Relative(),
}
"""Models of the families that classify."""


STEPS = ("tolerance", "sgd_steps", "recipe_steps")
"""Options of `check_plan`; all others of a case's check are those of its recipe."""


def parts_of(case: Case) -> tuple[Recipe, ModelConfig, Plan, Task]:
    """Return recipe, model, plan and task of a case."""
    settings = {name: value for name, value in case.check.items() if name not in STEPS}
    if case.family in BUILDERS:
        recipe, config = recipe_of(case.batch, **settings), BUILDERS[case.family](case)
        lora = recipe.lora
        config = config if lora.rank is None else adapted(config, lora.rank, lora.alpha, lora.targets)
        task = task_of(recipe, config.num_classes)
    else:
        name, model = TASKS[case.family]
        recipe = recipe_of(case.batch, model={**model, **case.model}, task__name=name, **settings)
        task = task_of(recipe, VOCABULARY)
        config = recipe.config(task.outputs, task.model_options)
    return recipe, config, validate(replace(parse(case.mesh), **case.plan), config, case.batch), task


def run_case(device: torch.device, case: Case) -> CheckResult:
    """Check one case, with one SGD step and two of the recipe unless it says others; runs on every rank.

    In fp64 the tolerances are far above rounding, so that one run with noise is enough.
    """
    recipe, config, plan, task = parts_of(case)
    steps = {"sgd_steps": 1} | {name: value for name, value in case.check.items() if name in STEPS}
    noisy_runs = 1 if recipe.train.precision == "fp64" else vitpar.check.plan.NOISY_RUNS
    with mock.patch.object(vitpar.check.plan, "NOISY_RUNS", noisy_runs):
        return check_plan(recipe, config, plan, device, task, **steps)


def run_compiled(device: torch.device, case: Case) -> tuple[CheckResult, int]:
    """Check one case with SGD steps, and return also how many graphs the compiler made of the model."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    # The steps of a recipe also compile the input normalisation, which would add graphs.
    without_normalising = replace(case, check={**case.check, "recipe_steps": 0})
    result = run_case(device, without_normalising)
    tried = 1  # `choose_compiling` compiles one graph to find out whether the compiler works
    return result, torch._dynamo.utils.counters["stats"]["unique_graphs"] - tried
