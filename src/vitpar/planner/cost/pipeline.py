"""Replay of a pipeline's step, action by action, in the order of its schedule.

A rank starts an action as soon as it is free and the action's input has arrived.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from vitpar.planner.cost.links import Wires
from vitpar.strategy import Plan
from vitpar.strategy.pipeline_orders import ActionOrder, ActionPart, action_order

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
    return 1 - computing / duration(action_order(plan, microbatches), plan.num_stages)


def duration(order: ActionOrder, num_stages: int) -> float:
    """Return the length of a step in `UNITS`, with free communication."""
    return ideal_events(order, num_stages)[-1].end


def ideal_events(order: ActionOrder, num_stages: int) -> list[Event]:
    """Return the events of a step in `UNITS`, with free communication."""
    return replay(order, num_stages, lambda computation, stage, microbatch: ActionCost(UNITS[computation]))[0]


@dataclass(frozen=True)
class Event:
    """One computation of a pipeline rank."""

    pp: int
    """Index of the rank on the pp axis."""
    computation: str
    """F, I, W or B, as in `ActionPart`."""
    stage: int
    """Number of the stage."""
    microbatch: int
    """Number of the micro-batch."""
    start: float
    """Second of the step at which it starts."""
    end: float
    """Second of the step at which it ends."""
    arrived: float | None = None
    """Second at which the message from another stage that it needs has arrived; None if it needs none."""

    def later(self, seconds: float) -> Event:
        """Return the event some seconds later."""
        arrived = None if self.arrived is None else self.arrived + seconds
        return replace(self, start=self.start + seconds, end=self.end + seconds, arrived=arrived)


class ActionCost(NamedTuple):
    """Cost of one action of a pipeline rank, on wires that nothing else uses."""

    seconds: float
    """Duration."""
    wires: Wires = ()
    """Wires to other nodes that its collectives use."""
    share: float = 0.0
    """Share of its time in which they are used."""
    left: float = 0.0
    """Seconds of the transfers that outlast it."""
    across: bool = False
    """Whether these use the wires, too."""


@dataclass
class _Lane:
    """Progress of one pipeline rank."""

    parts: deque[tuple[ActionPart, Sequence[ActionPart]]]
    """Parts of actions not yet finished, in order; each with all parts of its action if it is the last of them."""
    started: float | None = None
    """When the running part started; None while the rank waits."""
    arrived: float | None = None
    """`Event.arrived` of the running part."""
    transfer: _Work | None = None
    """Transfers that earlier actions left behind; None if they are done."""


@dataclass(eq=False)
class _Work:
    """An action, message or transfer that is under way."""

    done: Callable[[], None]
    """Function to call at its end."""
    left: float
    """Seconds at full speed that were left at `since`."""
    since: float
    """Second of the step at which `left` was counted."""
    wires: Wires = ()
    """Wires to other nodes that it uses."""
    share: float = 1.0
    """Share of its time in which it uses them."""
    order: int = -1
    """Rank of an action."""
    speed: float = 0.0
    """Speed since then, 1 for full speed."""
    entry: int = 0
    """Number of its valid entry in the heap of ends."""


class _Clock:
    """Second of the step, and the works under way, whose speeds depend on each other."""

    def __init__(self) -> None:
        self.now, self._number = 0.0, 0
        self._ends: list[tuple[float, int, int, _Work]] = []
        self._users: defaultdict[tuple[str, int], dict[_Work, None]] = defaultdict(dict)

    def start(self, work: _Work) -> None:
        """Start a work. Of works that end at the same time, messages come first, then actions by `order`."""
        if work.share:
            for wire in work.wires:
                self._users[wire][work] = None
        self._set_speed(work)
        self._retime(work)

    def add(self, work: _Work, seconds: float) -> None:
        """Make a work that is under way take `seconds` longer at full speed."""
        work.left += seconds - (self.now - work.since) * work.speed
        work.since, work.speed = self.now, 0.0
        self._set_speed(work)

    def run(self) -> None:
        """Let time pass until nothing is under way."""
        while self._ends:
            end, _, entry, work = heappop(self._ends)
            if entry != work.entry:
                continue
            self.now = end
            for wire in work.wires:
                self._users[wire].pop(work, None)
            self._retime(work)
            work.done()

    def _retime(self, changed: _Work) -> None:
        """Set the speeds of those that share wires with a work that starts or ends."""
        if changed.wires and changed.share:
            for work in {other: None for wire in changed.wires for other in self._users[wire]}:
                self._set_speed(work)

    def _set_speed(self, work: _Work) -> None:
        speed = 1.0
        if work.share and work.wires:
            others = max(sum(other.share for other in self._users[wire]) for wire in work.wires) - work.share
            # Two that use a wire all the time halve it. One that uses it for a part of its time is slowed down in that
            # part only, and slows the other one down in that part only.
            speed /= 1 + work.share * max(0.0, others)
        if speed != work.speed:
            work.left -= (self.now - work.since) * work.speed
            work.since, work.speed = self.now, speed
            self._number += 1
            work.entry = self._number
            heappush(self._ends, (self.now + max(0.0, work.left) / speed, work.order, work.entry, work))


def replay(
    order: ActionOrder,
    num_stages: int,
    cost: Callable[[str, int, int], ActionCost],
    hop: Callable[[int, int], tuple[float, Wires]] = lambda source, target: (0.0, ()),
) -> tuple[list[Event], dict[int, float]]:
    """Return (all events of a step, in the order in which they end, end of each rank's last transfer by its index).

    order: actions of each pipeline rank.
    cost: function of (computation, stage, micro-batch).
    hop: function of two stages that returns the seconds to send a micro-batch from one to the other, and the wires to
        other nodes that the message uses. Messages from one stage to another are sent one after the other.
    """
    clock, ends = _Clock(), dict[int, float]()
    lanes = {
        pp: _Lane(deque((part, action if part is action[-1] else ()) for action in actions for part in action))
        for pp, actions in order.items()
    }
    there: dict[ActionPart, float] = {}  # when inputs arrived, and actions finished, as "done F", "done I", ...
    waiting: dict[ActionPart, int] = {}  # rank by the input that it waits for
    queues: defaultdict[tuple[int, int], deque[ActionPart]] = defaultdict(deque)  # messages, the first is being sent
    events = []

    def start(pp: int) -> None:
        lane = lanes[pp]
        if lane.started is not None or not lane.parts:
            return
        part, _ = lane.parts[0]
        need = _need(*part, num_stages)
        if need is not None and need not in there:
            waiting[need] = pp
            return
        lane.started = clock.now
        lane.arrived = there[need] if need is not None and need[0] in "FB" else None
        seconds, wires, share, *_ = cost(*part)
        wires = wires if share else ()
        clock.start(_Work(partial(finish, pp), seconds, clock.now, wires, share, order=pp))

    def finish(pp: int) -> None:
        lane = lanes[pp]
        assert lane.started is not None
        part, finished = lane.parts.popleft()
        events.append(Event(pp, *part, lane.started, clock.now, lane.arrived))
        _, wires, _, left, across = cost(*part)
        if left and lane.transfer:
            clock.add(lane.transfer, left)
        elif left:
            lane.transfer = _Work(partial(end, pp), left, clock.now, wires if across else ())
            clock.start(lane.transfer)
        lane.started = None
        # torch sends the results of overlapped parts only after the last of them.
        for each, stage, number in finished:
            there["done " + each, stage, number] = clock.now
            target = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(each, -1)
            if 0 <= target < num_stages:
                queues[stage, target].append(("B" if each == "I" else each, target, number))
                if len(queues[stage, target]) == 1:
                    send(stage, target)
        start(pp)

    def send(source: int, target: int) -> None:
        seconds, wires = hop(source, target)
        clock.start(_Work(partial(arrive, source, target), seconds, clock.now, wires))

    def arrive(source: int, target: int) -> None:
        queue = queues[source, target]
        what = queue.popleft()
        if queue:
            send(source, target)
        there[what] = clock.now
        if what in waiting:
            start(waiting.pop(what))

    def end(pp: int) -> None:
        lanes[pp].transfer, ends[pp] = None, clock.now

    for pp in lanes:
        start(pp)
    clock.run()
    assert not any(lane.parts for lane in lanes.values()), "the ranks of the pipeline deadlock"
    return events, ends


def _need(computation: str, stage: int, number: int, num_stages: int) -> ActionPart | None:
    """Return what must have arrived before an action starts; None for the first stage's forward.

    F needs the previous stage's output, B and I the next stage's gradients, W the rank's own I. The last stage's B and
    I need its own forward.
    """
    if computation == "F":
        return ("F", stage, number) if stage else None
    if computation == "W":
        return "done I", stage, number
    return ("B", stage, number) if stage < num_stages - 1 else ("done F", stage, number)
