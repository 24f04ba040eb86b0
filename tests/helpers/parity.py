"""One case of the table of plans against one process."""

from dataclasses import replace

import pytest
import torch

from helpers.plans import Case
from vitpar import model_config, parse, validate
from vitpar.parallel.float8 import float8_fault
from vitpar.train.check import CheckResult, check_plan


def skip_what_cannot_run(precision: str) -> None:
    """Skip a test in fp8 where this build of torch has no float8 products with a scale for each row on CPUs."""
    if precision == "fp8" and (fault := float8_fault(torch.device("cpu"))):
        pytest.skip(f"torch {torch.__version__}: {fault}")


def run_case(device: torch.device, case: Case) -> CheckResult:
    """Check one case; runs on every rank."""
    config = model_config("vit_nano_patch4_16", **case.sizes)
    plan = validate(replace(parse(case.mesh), **case.plan), config, case.batch)
    return check_plan(config, plan, batch_size=case.batch, device=device, **case.check)


def run_compiled(device: torch.device, case: Case) -> tuple[CheckResult, int]:
    """Check one case; also how many graphs the compiler made."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return run_case(device, case), torch._dynamo.utils.counters["stats"]["unique_graphs"]
