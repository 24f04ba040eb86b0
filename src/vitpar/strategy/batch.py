"""Batch arithmetic: global batch -> data-parallel parts -> micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitpar.errors import StrategyError
from vitpar.limits import MAX_BATCH_SIZE
from vitpar.strategy.layer import Strategy
from vitpar.strategy.layout import ActivationPart, row_parts
from vitpar.strategy.plan import Plan
from vitpar.strategy.schedules import SCHEDULES
from vitpar.text import closest, count, divisors, either, shown


@dataclass(frozen=True)
class BatchArithmetic:
    """Division of a global batch: into data-parallel parts, and each of these into micro-batches.

    Micro-batch m of the step is images [m·n, (m + 1)·n) of the global batch, n = `microbatch_rows`. Every layer splits
    it among the ranks of its stage by its layout (`vitpar.strategy.layout`).
    """

    global_batch: int
    """Images per step: `data_parallel` × `local_batch`."""
    data_parallel: int
    """Number of data-parallel parts."""
    local_batch: int
    """Images of a data-parallel part per step: `microbatches` × `microbatch_size`."""
    microbatches: int
    """Number of micro-batches per step."""
    microbatch_size: int
    """Images of a micro-batch per data-parallel part."""

    @property
    def microbatch_rows(self) -> int:
        """Images of a micro-batch over all ranks of a stage."""
        return self.data_parallel * self.microbatch_size

    def rows(self, part: ActivationPart) -> list[int]:
        """Return the indices in the global batch of the images of a rank that holds `part` of each micro-batch."""
        n = self.microbatch_rows
        return [m * n + row for m in range(self.microbatches) for row in part.row_range(n)]


def batch_arithmetic(plan: Plan, batch_size: int) -> BatchArithmetic:
    """Return how `batch_size` images per step are divided under `plan`.

    Raises StrategyError if the batch does not divide into the plan's data-parallel parts, or a part does not divide
    into micro-batches that the schedule and the layers can run.
    """
    if plan.microbatches is not None and plan.microbatch_size is not None:
        raise StrategyError(
            f"both microbatches ({plan.microbatches}) and microbatch_size ({plan.microbatch_size}) are given: "
            "give one of them"
        )
    parts = plan.data_parallel
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise StrategyError(f"the batch size is {shown(batch_size)}: use 1 to {MAX_BATCH_SIZE:,}")
    local, rest = divmod(batch_size, parts)
    if rest:
        working = [n * parts for n in (local, local + 1) if n]
        raise StrategyError(
            f"a batch of {count(batch_size, 'sample')} does not divide into the {parts} data-parallel parts "
            f"of '{shown(plan)}': use {either(working)}"
        )
    microbatches = _microbatches(plan, batch_size, local)
    return BatchArithmetic(batch_size, parts, local, microbatches, local // microbatches)


def smallest_microbatch(plan: Plan) -> int:
    """Return the number of images that has to divide a data-parallel part's micro-batch.

    It exceeds 1 if a layer splits its batch further over tp (+sp and 3d).
    """
    return math.lcm(plan.data_parallel, *(row_parts(strategy) for strategy in plan.distinct)) // plan.data_parallel


def schedule_objection(plan: Plan, microbatches: int) -> str | None:
    """Return why the plan's schedule cannot run `microbatches` micro-batches; None if it can."""
    pp, stages, schedule = plan.pipeline_degree, plan.num_stages, SCHEDULES[plan.schedule]
    if pp == 1:
        return None
    if microbatches < schedule.needs * stages:
        return (
            f"schedule {schedule.name} over {stages} stages needs at least {stages} micro-batches, not {microbatches}"
        )
    if schedule.rounds and microbatches % max(1, microbatches // pp):
        return (
            f"schedule {schedule.name} over pp{pp} cannot run {microbatches} micro-batches "
            f"in {microbatches // pp} equal rounds"
        )
    return None


def _microbatches(plan: Plan, batch_size: int, local: int) -> int:
    """Return the number of micro-batches for `local` samples per data-parallel part."""
    unit = smallest_microbatch(plan)
    part = f"{count(local, 'sample')} of a data-parallel part (batch {batch_size} over '{shown(plan)}')"
    if local % unit:
        raise StrategyError(
            f"the {part} cannot be split into {unit}, as '{_most_cut(plan)}' splits a micro-batch over tp: "
            f"use a batch of {either(n * unit * plan.data_parallel for n in (local // unit, local // unit + 1) if n)}"
        )
    working = [n for n in divisors(local // unit) if not schedule_objection(plan, n)]
    if not working:
        raise StrategyError(
            f"schedule {plan.schedule} over {plan.num_stages} stages needs at least {plan.num_stages} micro-batches, "
            f"more than the {part}: use a batch of {plan.num_stages * unit * plan.data_parallel} or more, "
            "fewer stages, or schedule gpipe"
        )
    number, size = plan.microbatches, plan.microbatch_size
    if number is not None:
        rest, fix = local % number, f"use {either(closest(working, number))}"
        what = count(number, "micro-batch")
    elif size is not None:
        number, rest = divmod(local, size)
        fix = f"use a microbatch_size of {either(closest([local // n for n in working], size))}"
        what = f"micro-batches of {count(size, 'sample')}"
    else:
        # 2 · pp keeps the pipeline's idle share under a third without making micro-batches small.
        pp = plan.pipeline_degree
        return 1 if pp == 1 else min(working, key=lambda n: (abs(n - 2 * pp), -n))
    if number in working and not rest:
        return number
    if not rest and (objection := schedule_objection(plan, number)):
        raise StrategyError(f"{objection}: {fix}")
    parts = f", {unit} samples at a time, as '{_most_cut(plan)}' does over tp" if unit > 1 else ""
    raise StrategyError(f"{what} cannot split the {part} evenly{parts}: {fix}")


def _most_cut(plan: Plan) -> Strategy:
    """Return the strategy that splits its batch most beyond its data-parallel parts."""
    return max(plan.distinct, key=lambda strategy: row_parts(strategy) // strategy.data_parallel)
