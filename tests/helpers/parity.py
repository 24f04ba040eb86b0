"""Check of one `helpers.plans.Case` against one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.plans import Case
from vitpar import model_config, parse, validate
from vitpar.check import CheckResult, check_plan, recipe_to_check
from vitpar.models import ViTConfig
from vitpar.parallel import Communication
from vitpar.parallel.float8 import float8_fault
from vitpar.strategy import Plan


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


def check(
    config: ViTConfig,
    plan: Plan,
    batch_size: int,
    device: torch.device,
    *,
    communication: Communication = Communication(),
    tolerance: float | None = None,
    sgd_steps: int = 2,
    recipe_steps: int = 2,
    **settings: Any,
) -> CheckResult:
    """Check a plan; runs on every rank.

    settings: names in `KEYS`, or recipe keys with `__` for the dot
    """
    options = {KEYS.get(name, name.replace("__", ".")): value for name, value in settings.items()}
    if options.get("train.precision") == "fp8":
        options.setdefault("train.fp8_min_features", 0)  # models of tests are small
    options |= {f"communication.{name}": value for name, value in vars(communication).items()}
    recipe = recipe_to_check({"train.batch_size": batch_size, **options})
    steps = {"sgd_steps": sgd_steps, "recipe_steps": recipe_steps}
    return check_plan(recipe, config, plan, device, tolerance=tolerance, **steps)


def run_case(device: torch.device, case: Case) -> CheckResult:
    """Check one case; runs on every rank."""
    config = model_config("vit_nano_patch4_16", **case.sizes)
    plan = validate(replace(parse(case.mesh), **case.plan), config, case.batch)
    return check(config, plan, case.batch, device, **case.check)


def run_compiled(device: torch.device, case: Case) -> tuple[CheckResult, int]:
    """Check one case with SGD steps, and return also how many graphs the compiler made of the model."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    # The steps of a recipe also compile the input normalisation, which would add graphs.
    without_normalising = replace(case, check={**case.check, "recipe_steps": 0})
    result = run_case(device, without_normalising)
    tried = 1  # `choose_compiling` compiles one graph to find out whether the compiler works
    return result, torch._dynamo.utils.counters["stats"]["unique_graphs"] - tried
