"""Changes that reduce the memory of a rank, for messages."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from vitpar.errors import StrategyError
from vitpar.models.config import ModelConfig
from vitpar.planner.cost.memory import Memory
from vitpar.strategy import Plan, batch_arithmetic, validate
from vitpar.text import divisors


def less_memory(need: Memory | None, config: ModelConfig, plan: Plan, batch_size: int, precision: str) -> list[str]:
    """Return changes that reduce the memory of a rank and that the plan does not have yet, most helpful first.

    need: predicted memory of the rank; None if it is unknown
    """
    more = _more_microbatches(config, plan, batch_size)
    acts = [] if more is None else [f"--microbatches {more}"]
    if any(strategy.checkpoint is None for strategy in plan.distinct):
        acts.append("+ckpt")
    if precision in ("fp64", "fp32"):
        acts.append("--precision bf16")
    kept = []
    if plan.data_parallel > 1 and not any(strategy.has("fsdp") for strategy in plan.distinct):
        kept += ["fsdp in place of dp", *(["+zero1"] if not any(strategy.zero for strategy in plan.distinct) else [])]
    elif not any(strategy.offload for strategy in plan.distinct):
        kept += ["more GPUs with fsdp", "+offload"]
    state = 0.0 if need is None else need.parameters + need.optimizer + need.gradients
    ways = [*kept, *acts] if need is not None and state > need.total / 2 else [*acts, *kept]
    return ways or [smaller_batch(plan, batch_size) or "a smaller model"]


def smaller_batch(plan: Plan, batch_size: int) -> str | None:
    """Return `a smaller --batch-size`; None if each data-parallel rank has one image already."""
    return "a smaller --batch-size" if batch_arithmetic(plan, batch_size).local_batch > 1 else None


def _more_microbatches(config: ModelConfig, plan: Plan, batch_size: int) -> int | None:
    """Return the next larger number of micro-batches that the plan can run; None if there is none."""
    batch = batch_arithmetic(plan, batch_size)
    for number in divisors(batch.local_batch):
        if number > batch.microbatches:
            with suppress(StrategyError):
                validate(replace(plan, microbatches=number, microbatch_size=None), config, batch_size)
                return number
    return None
