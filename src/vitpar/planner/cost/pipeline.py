"""Replay of a pipeline's step, action by action, in the order in which torch's schedules run them on each rank.

A rank starts an action as soon as it is free and the action's input has arrived. Ranks that share the cores of a
machine compute equally fast.
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
"""Relative duration of a stage's actions: forward, gradients of inputs, of weights, of both."""


def idle_share(plan: Plan, microbatches: int) -> float:
    """Return the share of a step that each pipeline rank idles (the bubble), 0 to 1.

    Assumes equal stages, a backward twice as long as the forward, and free communication. With p ranks and m
    micro-batches it is (p - 1) / (m + p - 1) under gpipe and 1f1b. Source: "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 2.1, whose ratio is of idle to ideal time.
    The other schedules are replayed: no formula fits if pp does not divide the number of micro-batches.
    """
    ranks = plan.pipeline_degree
    if plan.schedule in ("gpipe", "1f1b") or ranks == 1:
        return (ranks - 1) / (microbatches + ranks - 1)
    # All ranks compute equally long and the step ends for all at once, so one figure is valid for every rank.
    computing = plan.virtual_stages * microbatches * (UNITS["F"] + UNITS["B"])
    return 1 - computing / duration(order(plan, microbatches), plan.num_stages)


def duration(order: ActionOrder, num_stages: int) -> float:
    """Return the length of a step in `UNITS`, with free communication."""
    return replay(order, num_stages, lambda kind, stage, microbatch: UNITS[kind])[-1].end


def order(plan: Plan, microbatches: int) -> ActionOrder:
    """Return the actions that torch's schedule runs on every rank of the plan's pipeline, without a process group."""
    if plan.schedule == "1f1b":  # torch's list (2.13) is not what it runs: the last rank starts with micro-batch 1
        return {pp: _one_forward_one_backward(pp, plan.pipeline_degree, microbatches) for pp in range(plan.num_stages)}
    kind = CLASSES[plan.schedule]
    # These attributes are all that a schedule reads from a stage to list its actions.
    stage: Any = SimpleNamespace(num_stages=plan.num_stages, group_size=plan.pipeline_degree, group_rank=0, submod=None)
    if not issubclass(kind, PipelineScheduleMulti):
        found = kind(stage, microbatches).pipeline_order or {}
    else:
        # Adding sends and receives to the list takes longer than everything else here, and `replay` needs none.
        bare = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda *_: None})
        found = bare([stage] * plan.virtual_stages, microbatches).pipeline_order
    parts = {pp: [_parts(action) for action in actions if action is not None] for pp, actions in found.items()}
    return {pp: [action for action in actions if action] for pp, actions in parts.items()}


def _one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[list[ActionPart]]:
    """Return the actions of a rank under 1f1b: warm-up forwards, then backward and forward in turns, then backwards."""
    first = min(microbatches, stages - stage)
    found = [("F", stage, number) for number in range(first)]
    for number in range(microbatches):
        found.append(("B", stage, number))
        if first + number < microbatches:
            found.append(("F", stage, first + number))
    return [[part] for part in found]


def _parts(action: Any) -> list[ActionPart]:
    """Return the computations of one of torch's actions: two if it overlaps them, none if it only communicates."""
    every = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in action.sub_actions or (action,)]
    return [part for part in every if part[0] in UNITS]


ActionPart = tuple[str, int, int]
"""(kind, stage, micro-batch); kinds: F forward, I gradients of inputs, W of weights, B of both."""
ActionOrder = Mapping[int, Sequence[Sequence[ActionPart]]]
"""Actions of each pipeline rank in order, by index on the pp axis. Several parts in one action are overlapped."""


@dataclass(frozen=True)
class Event:
    """One computation of a pipeline rank."""

    pp: int
    """Index of the rank on the pp axis."""
    kind: str
    """F, I, W or B, as in `ActionPart`."""
    stage: int
    """Number of the stage."""
    microbatch: int
    """Number of the micro-batch."""
    start: float
    """Second of the step at which it starts."""
    end: float
    """Second of the step at which it ends."""


@dataclass
class _Lane:
    """Progress of one pipeline rank."""

    actions: deque[Sequence[ActionPart]]
    """Actions not yet finished, in order."""
    part: int = 0
    """Index in the first action of the part that runs or comes next."""
    started: float | None = None
    """When the running part started; None while the rank waits."""


def replay(
    order: ActionOrder,
    num_stages: int,
    seconds: Callable[[str, int, int], float],
    sending: Callable[[int, int], float] = lambda source, target: 0.0,
    at_once: float = float("inf"),
) -> list[Event]:
    """Return all events of a step, in the order in which they end.

    order: actions of each pipeline rank.
    seconds: returns the duration of a (kind, stage, micro-batch) on cores that no other pipeline rank shares.
    sending: returns the seconds to send a micro-batch from one stage to another. Messages from one stage to another
        are sent one after the other.
    at_once: number of pipeline ranks that the cores can run at full speed.
    """
    lanes = {pp: _Lane(deque(actions)) for pp, actions in order.items()}
    # All running ranks have the same speed. So one number measures their work: `progress`, the seconds of full speed
    # that a rank would have worked since the step began. A part ends at a fixed progress, whatever the speed meanwhile.
    now, progress = 0.0, 0.0
    running: list[tuple[float, int]] = []  # heap of (progress at the end, rank)
    travelling: list[tuple[float, ActionPart]] = []  # heap of (second of arrival, input)
    there: set[ActionPart] = set()  # inputs that have arrived, and finished actions as "done F", "done I", ...
    waiting: dict[ActionPart, int] = {}  # rank by the input that it waits for
    sent: dict[tuple[int, int], float] = {}  # second at which the last message from one stage to another arrives
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
        # torch sends the results of overlapped parts only after the last of them.
        if lane.part == len(lane.actions[0]):
            for each, stage, number in lane.actions.popleft():
                there.add(("done " + each, stage, number))
                target = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(each, -1)
                if 0 <= target < num_stages:
                    moment = max(now, sent.get((stage, target), 0.0)) + sending(stage, target)
                    sent[stage, target] = moment
                    heappush(travelling, (moment, ("B" if each == "I" else each, target, number)))
            lane.part = 0
        start(pp)
    assert not any(lane.actions for lane in lanes.values()), "the ranks of the pipeline deadlock"
    return events


def _need(kind: str, stage: int, number: int, num_stages: int) -> ActionPart | None:
    """Return what must have arrived before an action starts; None for the first stage's forward.

    F needs the previous stage's output, B and I the next stage's gradients, W the rank's own I. The last stage's B and
    I need its own forward.
    """
    if kind == "F":
        return ("F", stage, number) if stage else None
    if kind == "W":
        return "done I", stage, number
    return ("B", stage, number) if stage < num_stages - 1 else ("done F", stage, number)
