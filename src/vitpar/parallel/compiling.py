"""Choice whether the blocks of a model are compiled.

By default they are compiled on GPUs, if the plan allows it and the compiler works on every rank. The compiler caches
its results on disk (TORCHINDUCTOR_CACHE_DIR), so the next start of the same model is fast.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vitpar.errors import RecipeError, StrategyError
from vitpar.launch.world_group import all_gather_json
from vitpar.strategy import Plan
from vitpar.strategy.support import refuse_clashes


class Compiling(NamedTuple):
    """Whether blocks are compiled, and why not."""

    blocks: bool
    """Whether the blocks are compiled."""
    because: str | None = None
    """Reason why they are not compiled although the default is to compile; None otherwise."""


def choose_compiling(wanted: bool | None, plan: Plan, precision_name: str, device: torch.device) -> Compiling:
    """Return whether to compile: `wanted`, or the default above if it is None. Collective; equal on all ranks.

    Raises RecipeError if `wanted` is true and the compiler does not work on a rank.
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
    """Return the reason why the compiler does not work for `device`, None if it compiles a small function."""
    x = torch.ones(8, device=device, requires_grad=True)
    try:
        torch.compile(lambda x: torch.nn.functional.gelu(x) * 2)(x).sum().backward()
    except Exception as error:  # of any kind: a missing or broken C++ compiler, Triton, driver, full disk
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return f"the compiler does not work for this {device.type} device ({reason})"
    return None
