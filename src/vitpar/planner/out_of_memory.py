"""Predicted memory of a training, and messages where it is too much: need, available memory, what needs less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from vitpar.errors import DataError, DeviceMemoryError, PlannerError, RecipeError, StrategyError, UserError
from vitpar.launch.resources import host_memory
from vitpar.models.config import ModelConfig
from vitpar.planner.cost.memory import PARTS, Memory
from vitpar.planner.cost.price import price
from vitpar.planner.sources import recipe_costs
from vitpar.recipe import Recipe
from vitpar.strategy import Plan, batch_arithmetic, place_of_rank, validate
from vitpar.tasks.data import held_bytes
from vitpar.text import count, divisors, either, size
from vitpar.training.optim.state_memory import moments

if TYPE_CHECKING:
    import torch

# The CUDA driver and cuBLAS allocate outside of torch's allocator, and say so in a RuntimeError.
_TEXT = re.compile(r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED")
IMPOSSIBLE = 2.0
"""Predicted memory relative to the machine's from which a run on CPUs is refused."""
_SHOWN = 0.1  # share of the predicted memory below which a part is not named


@contextmanager
def explain_memory(recipe: Recipe, config: ModelConfig, plan: Plan, device: torch.device) -> Iterator[None]:
    """Raise DeviceMemoryError in place of CUDA's own error if the ``with`` block runs out of device memory.

    recipe: recipe with its precision resolved
    config: shape of the model
    plan: validated plan of the training
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(_sentence(recipe, config, plan, device)) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error` or one of its causes reports that CUDA is out of memory."""
    import torch

    # torch's pipelining wraps errors, so the causes count too.
    if error is None:
        return False
    matches = isinstance(error, torch.cuda.OutOfMemoryError)
    matches = matches or (isinstance(error, RuntimeError) and _TEXT.search(str(error)) is not None)
    return matches or is_out_of_memory(error.__cause__)


def memory_of(recipe: Recipe, config: ModelConfig, plan: Plan, device_type: str) -> tuple[Memory, ...]:
    """Return the predicted memory of a recipe's training, of the fullest rank at each place of the pp axis.

    Nothing is measured. The images that each GPU holds count; ranks that compute on CPUs hold them together.

    plan: validated plan

    Raises PlannerError if the plan cannot be priced.
    """
    # Any cluster does: its rates only affect times.
    costs = recipe_costs(recipe, config, f"{-(-plan.world_size // 8)}x8xH100", plan.world_size, compiled=False)
    if device_type == "cuda":
        with suppress(DataError):  # it is raised where the data are used
            costs.reserve(held_bytes(recipe, config))
    return price(plan, costs, recipe.train.batch_size, moments(recipe, config)).memory


def refuse_impossible(recipe: Recipe, config: ModelConfig, plan: Plan, local_ranks: int) -> None:
    """Raise RecipeError if a step on CPUs needs far more memory than the machine has: the system would kill the ranks.

    Predictions are off by a few percent, so `IMPOSSIBLE` times the memory leaves no doubt. For less there is a warning.

    local_ranks: ranks on this machine
    """
    need, there = _need(recipe, config, plan, "cpu"), host_memory()
    if need and local_ranks * need.total > IMPOSSIBLE * there:
        batch = smaller_batch(plan, recipe.train.batch_size)
        raise RecipeError(
            f"{memory_words(need)} a rank, but {count(local_ranks, 'rank')} of this machine share {size(there)}: use "
            f"{either(dict.fromkeys(filter(None, [batch, *_ways(need, recipe, config, plan)])))}"
        )


def memory_warning(
    recipe: Recipe, config: ModelConfig, plan: Plan, device: torch.device, local_ranks: int
) -> str | None:
    """Return a warning if a step is predicted to need more memory than there is; None if it fits.

    On a CPU the `local_ranks` ranks of the machine share its memory.
    """
    from vitpar.planner.measure.device import memory_bytes

    need, there = _need(recipe, config, plan, device.type), memory_bytes(device)
    if need is None or (local_ranks if device.type == "cpu" else 1) * need.total <= there:
        return None
    where = "the GPU has" if device.type == "cuda" else f"{count(local_ranks, 'rank')} of this machine share"
    return f"{memory_words(need)} per rank, but {where} {size(there)}: use {either(_ways(need, recipe, config, plan))}"


def _need(recipe: Recipe, config: ModelConfig, plan: Plan, device_type: str) -> Memory | None:
    """Return the predicted memory of the fullest rank; None if the plan cannot be priced."""
    try:
        return max(memory_of(recipe, config, plan, device_type), key=lambda one: one.total)
    except PlannerError:
        return None


def _sentence(recipe: Recipe, config: ModelConfig, plan: Plan, device: torch.device) -> str:
    """Return the message of an out-of-memory error of this rank: need, available memory, remedies."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    need = None
    with suppress(UserError):  # a teacher's weights may be gone, too
        memory = memory_of(recipe, config, plan, device.type)
        need = memory[place_of_rank(plan, rank)[0]]
    facts = [words for words in (memory_words(need) if need else None, _available(device)) if words]
    return (
        f"CUDA is out of memory on rank {rank}{': ' * bool(facts)}{' and '.join(facts)}: "
        f"use {either(_ways(need, recipe, config, plan))}"
    )


def memory_words(need: Memory) -> str:
    """Return the need in words, as in `a step is predicted to need 91.3 GB (activations 70 GB, parameters 12 GB)`."""
    parts = sorted(((getattr(need, part), part) for part in PARTS), reverse=True)
    named = ", ".join(f"{part} {size(number)}" for number, part in parts if number >= _SHOWN * need.total)
    return f"a step is predicted to need {size(need.total)} ({named})"


def _available(device: torch.device) -> str | None:
    """Return the available memory in words; None if the device does not report it.

    Example: `the GPU has 79.2 GB, of which other programs and the CUDA runtime take 3.1 GB`.
    """
    if device.type != "cuda":
        return None
    import torch

    with suppress(RuntimeError):  # the query itself can fail when memory is exhausted
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        used = f", of which other programs and the CUDA runtime take {size(others)}" if others > 0.02 * total else ""
        return f"the GPU has {size(total)}{used}"
    return None


def _ways(need: Memory | None, recipe: Recipe, config: ModelConfig, plan: Plan) -> list[str]:
    ways = less_memory(need, config, plan, recipe.train.batch_size, recipe.train.precision)
    return [*ways, "data.cache memory"] if recipe.data.cache == "device" else ways


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
