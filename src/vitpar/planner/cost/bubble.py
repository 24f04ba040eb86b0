"""How long the ranks of a pipeline wait, by a formula or by replaying what torch has every rank do, in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from vitpar.parallel.pipeline import CLASSES
from vitpar.planner.cost.replay import Order, Part, replay
from vitpar.strategy import Plan

UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}
"""How long a stage takes for a micro-batch: forward, gradients of inputs, of weights, of both."""


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


def duration(order: Order, num_stages: int) -> float:
    """`UNITS` until the last rank is done."""
    return replay(order, num_stages, lambda kind, stage, microbatch: UNITS[kind])[-1].end


def order(plan: Plan, microbatches: int) -> Order:
    """What torch has every rank of the plan's pipeline compute; needs no process group."""
    if plan.schedule == "1f1b":  # torch's list (2.13) is not what it runs: the last rank starts with micro-batch 1
        return {pp: _one_forward_one_backward(pp, plan.pipeline_degree, microbatches) for pp in range(plan.num_stages)}
    kind = CLASSES[plan.schedule]
    stage = SimpleNamespace(num_stages=plan.num_stages, group_size=plan.pipeline_degree, group_rank=0, submod=None)
    if not issubclass(kind, PipelineScheduleMulti):
        found = kind(stage, microbatches).pipeline_order or {}
    else:
        # Where sends and receives go is not needed, and takes longer than all else here.
        bare = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda *_: None})
        found = bare([stage] * plan.virtual_stages, microbatches).pipeline_order
    parts = {pp: [_parts(action) for action in actions if action is not None] for pp, actions in found.items()}
    return {pp: [action for action in actions if action] for pp, actions in parts.items()}


def _one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[list[Part]]:
    first = min(microbatches, stages - stage)
    found = [("F", stage, number) for number in range(first)]
    for number in range(microbatches):
        found.append(("B", stage, number))
        if first + number < microbatches:
            found.append(("F", stage, first + number))
    return [[part] for part in found]


def _parts(action: Any) -> list[Part]:
    """What an action of torch's computes: both where two are overlapped, nothing where it only sends."""
    every = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in action.sub_actions or (action,)]
    return [part for part in every if part[0] in UNITS]
