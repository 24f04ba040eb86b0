"""How long the ranks of a pipeline wait, by a formula or by replaying what torch has every rank do, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from vitpar.parallel.pipeline import CLASSES
from vitpar.strategy import Plan

UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}
"""How long a stage takes for a micro-batch: forward, gradients of inputs, of weights, of both."""
Order = Mapping[int, Sequence[Any]]
"""By place on the pp axis: torch's actions in order, None where a rank waits anyway."""


def idle_share(plan: Plan, microbatches: int) -> float:
    """The part of a step that a pipeline rank waits, 0 to 1, were all stages equally long, backward twice as long as
    forward and communication free.

    With p ranks and m micro-batches it is (p - 1) / (m + p - 1) under gpipe and 1f1b. Source: "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 2.1, whose ratio is of idle
    to ideal time. The other schedules are replayed: for numbers of micro-batches that pp does not divide no formula
    fits. Every rank computes equally long and the step ends for all at once, so that all wait equally long.
    """
    ranks = plan.pipeline_degree
    if plan.schedule in ("gpipe", "1f1b") or ranks == 1:
        return (ranks - 1) / (microbatches + ranks - 1)
    computing = plan.virtual_stages * microbatches * (UNITS["F"] + UNITS["B"])
    return 1 - computing / duration(order(plan, microbatches), plan.num_stages)


def order(plan: Plan, microbatches: int) -> Order:
    """What torch has every rank of the plan's pipeline compute; needs no process group.

    Not for 1f1b: torch's list (2.13) is not what it runs, on the last rank it starts with the second micro-batch.
    """
    assert plan.schedule != "1f1b", "torch's list for 1f1b is wrong"
    kind = CLASSES[plan.schedule]
    stage = SimpleNamespace(num_stages=plan.num_stages, group_size=plan.pipeline_degree, group_rank=0, submod=None)
    if not issubclass(kind, PipelineScheduleMulti):
        return kind(stage, microbatches).pipeline_order or {}
    # Where sends and receives go is not needed, and takes longer than all else here.
    bare = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda *_: None})
    return bare([stage] * plan.virtual_stages, microbatches).pipeline_order


def duration(order: Order, num_stages: int) -> int:
    """Units until the last rank is done, where each starts an action as soon as it is free and has what the action
    needs.

    What overlapped actions give reaches other ranks after the last of them, as torch sends it then.
    """
    lists = [[_parts(action) for action in order[rank] if action is not None] for rank in sorted(order)]
    free, position = [0] * len(lists), [0] * len(lists)
    ready: dict[tuple[str, int, int], int] = {}
    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions):
                parts = actions[position[rank]]
                needs = [_need(*part, num_stages) for part in parts]
                if any(need is not None and need not in ready for need in needs):
                    break
                for (kind, _, _), need in zip(parts, needs, strict=True):
                    free[rank] = max(free[rank], ready[need] if need else 0) + UNITS[kind]
                ready |= {("B" if kind == "I" else kind, stage, number): free[rank] for kind, stage, number in parts}
                position[rank] += 1
                moving = True
    assert position == [len(actions) for actions in lists], "the ranks of the pipeline wait for each other for ever"
    return max(free)


def _parts(action: Any) -> list[tuple[str, int, int]]:
    """(kind, stage, micro-batch) of an action that computes, of both where two are overlapped."""
    every = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in action.sub_actions or (action,)]
    return [part for part in every if part[0] in UNITS]


def _need(kind: str, stage: int, number: int, num_stages: int) -> tuple[str, int, int] | None:
    """What must have been computed before: the stage before in forward, the stage behind in backward."""
    if kind == "W":
        return "B", stage, number
    if kind == "F":
        return ("F", stage - 1, number) if stage else None
    return ("B", stage + 1, number) if stage < num_stages - 1 else ("F", stage, number)
