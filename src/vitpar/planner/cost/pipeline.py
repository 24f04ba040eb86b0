"""A pipeline's step, action by action: what torch has each rank compute in order, replayed with how long everything
takes; and how long its ranks wait, by a formula or by that replay.

A rank starts an action as soon as it is free and has what the action needs. Where ranks share a machine's cores, all
that compute at a time go on equally fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from vitpar.parallel.pipeline import CLASSES
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


def duration(order: ActionOrder, num_stages: int) -> float:
    """`UNITS` until the last rank is done."""
    return replay(order, num_stages, lambda kind, stage, microbatch: UNITS[kind])[-1].end


def order(plan: Plan, microbatches: int) -> ActionOrder:
    """Return the actions that torch's schedule runs on every rank of the plan's pipeline; needs no process group."""
    if plan.schedule == "1f1b":  # torch's list (2.13) is not what it runs: the last rank starts with micro-batch 1
        return {pp: _one_forward_one_backward(pp, plan.pipeline_degree, microbatches) for pp in range(plan.num_stages)}
    kind = CLASSES[plan.schedule]
    # All that the schedules ask of a stage to list their actions.
    stage: Any = SimpleNamespace(num_stages=plan.num_stages, group_size=plan.pipeline_degree, group_rank=0, submod=None)
    if not issubclass(kind, PipelineScheduleMulti):
        found = kind(stage, microbatches).pipeline_order or {}
    else:
        # Where sends and receives go is not needed, and takes longer than all else here.
        bare = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda *_: None})
        found = bare([stage] * plan.virtual_stages, microbatches).pipeline_order
    parts = {pp: [_parts(action) for action in actions if action is not None] for pp, actions in found.items()}
    return {pp: [action for action in actions if action] for pp, actions in parts.items()}


def _one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[list[ActionPart]]:
    first = min(microbatches, stages - stage)
    found = [("F", stage, number) for number in range(first)]
    for number in range(microbatches):
        found.append(("B", stage, number))
        if first + number < microbatches:
            found.append(("F", stage, first + number))
    return [[part] for part in found]


def _parts(action: Any) -> list[ActionPart]:
    """Return the computations of one of torch's actions: two if overlapped, none if it only communicates."""
    every = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in action.sub_actions or (action,)]
    return [part for part in every if part[0] in UNITS]


ActionPart = tuple[str, int, int]
"""(kind, stage, micro-batch); kinds: F forward, I gradients of inputs, W of weights, B of both."""
ActionOrder = Mapping[int, Sequence[Sequence[ActionPart]]]
"""By place on the pp axis: what the rank computes, one after the other; several parts together are overlapped."""


@dataclass(frozen=True)
class Event:
    """A rank of the pp axis (`pp`) computes `kind` of one micro-batch for a stage, from `start` to `end`."""

    pp: int
    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass
class _Lane:
    """One rank: its actions, each of one part or of several that are overlapped, and the first part not yet started."""

    actions: deque[Sequence[ActionPart]]
    part: int = 0
    started: float | None = None


def replay(
    order: ActionOrder,
    num_stages: int,
    seconds: Callable[[str, int, int], float],
    sending: Callable[[int, int], float] = lambda source, target: 0.0,
    at_once: float = float("inf"),
) -> list[Event]:
    """All events of a step, in the order in which they end.

    seconds: of a kind, stage and micro-batch, for a rank that has a core for itself. sending: seconds from one stage to
    another. at_once: how many ranks of the pp axis the cores can keep busy.
    What overlapped actions give reaches other ranks after the last of them, as torch sends it then.
    """
    lanes = {pp: _Lane(deque(actions)) for pp, actions in order.items()}
    now, progress = 0.0, 0.0  # seconds, and what a rank that has computed all the time has got done
    running: list[tuple[float, int]] = []  # (progress at which it is done, rank)
    travelling: list[tuple[float, ActionPart]] = []
    there: set[ActionPart] = set()
    waiting: dict[ActionPart, int] = {}
    events = []

    def start(pp: int) -> None:
        lane = lanes[pp]
        if lane.started is None and lane.actions:
            part = lane.actions[0][lane.part]
            need = _need(*part, num_stages)
            if need is None or need in there:
                lane.started = now
                heappush(running, (progress + seconds(*part), pp))
            else:
                waiting[need] = pp

    def arrive(what: ActionPart) -> None:
        there.add(what)
        if what in waiting:
            start(waiting.pop(what))

    for pp in lanes:
        start(pp)
    while running or travelling:
        speed = min(1.0, at_once / len(running)) if running else 1.0
        done = now + (running[0][0] - progress) / speed if running else float("inf")
        if travelling and travelling[0][0] <= done:
            moment, what = heappop(travelling)
            now, progress = moment, progress + (moment - now) * speed
            arrive(what)
            continue
        progress, pp = heappop(running)
        now, lane = done, lanes[pp]
        assert lane.started is not None
        kind, stage, number = lane.actions[0][lane.part]
        events.append(Event(pp, kind, stage, number, lane.started, now))
        lane.started, lane.part = None, lane.part + 1
        if lane.part == len(lane.actions[0]):
            for each, stage, number in lane.actions.popleft():
                there.add(("done " + each, stage, number))
                target = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(each, -1)
                if 0 <= target < num_stages:
                    moment = now + sending(stage, target)
                    heappush(travelling, (moment, ("B" if each == "I" else each, target, number)))
            lane.part = 0
        start(pp)
    assert not any(lane.actions for lane in lanes.values()), "the ranks of the pipeline deadlock"
    return events


def _need(kind: str, stage: int, number: int, num_stages: int) -> ActionPart | None:
    """Return the action that must have finished before: the previous stage's forward, the next stage's backward, or the
    rank's own earlier work on the micro-batch."""
    if kind == "F":
        return ("F", stage, number) if stage else None
    if kind == "W":
        return "done I", stage, number
    return ("B", stage, number) if stage < num_stages - 1 else ("done F", stage, number)
