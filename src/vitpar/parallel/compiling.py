"""Whether the blocks of a model are compiled.

Where a recipe leaves it open they are on GPUs, if nothing in the plan and nothing on the machine speaks against it.
What the compiler makes it keeps on disk (TORCHINDUCTOR_CACHE_DIR), so that the next start of the same model is quick.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vitpar.errors import RecipeError, StrategyError
from vitpar.launch.world_group import all_gather_json
from vitpar.strategy import Plan
from vitpar.strategy.support import refuse_clashes


class Compiling(NamedTuple):
    """blocks: whether they are compiled. because: why they are not, where they would be by default."""

    blocks: bool
    because: str | None = None


def choose_compiling(wanted: bool | None, plan: Plan, precision_name: str, device: torch.device) -> Compiling:
    """`wanted`, or where that is None the default above. Collective; equal on all ranks.

    Raises RecipeError where it is wanted and the compiler does not work on a rank.
    """
    if wanted is False or (wanted is None and device.type == "cpu"):
        return Compiling(False)
    if wanted is None:
        try:
            refuse_clashes(plan, precision_name, compile_blocks=True)
        except StrategyError as clash:
            return Compiling(False, str(clash))
    fault = next(filter(None, all_gather_json(compiler_fault(device))), None)
    if fault and wanted:
        raise RecipeError(f"train.compile is true, but {fault}: fix that, or leave train.compile out")
    return Compiling(fault is None, fault)


def compiler_fault(device: torch.device) -> str | None:
    """Why nothing can be compiled for `device`, in a few words; None where it can. Compiles a few operations."""
    x = torch.ones(8, device=device, requires_grad=True)
    try:
        torch.compile(_few_operations)(x).sum().backward()
    except Exception as error:  # of any kind: a missing or broken C++ compiler, Triton, driver, full disk
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return f"the compiler does not work for this {device.type} device ({reason})"
    return None


def _few_operations(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x) * 2
