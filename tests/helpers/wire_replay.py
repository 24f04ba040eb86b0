"""Replay of a training step on every rank of a cluster, which shares no code with the planner's cost model.

Each rank runs its actions, layer by layer. What it sends occupies the wire of its device and, between nodes, a network
card of its node, in both directions independently. Messages that need one wire at the same time share it evenly.
Operations of one group of ranks run one after the other, as those of an
NCCL communicator do, and so do the messages from one rank to another.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from vitpar.strategy import Plan


class Wire(NamedTuple):
    """Rate of a wire in either direction."""

    bandwidth: float
    """Bytes per second."""
    latency: float
    """Seconds of an empty message."""


@dataclass(frozen=True)
class Machine:
    """Equal nodes with equal devices."""

    devices: int
    """Devices of a node."""
    nics: int
    """Network cards of a node. Device n uses card n · nics // devices."""
    intra: Wire
    """Wire of a device."""
    inter: Wire
    """Wire of a network card."""


class Message(NamedTuple):
    """Operation among the ranks along an axis of the plan."""

    operation: str
    """all_reduce, all_gather or reduce_scatter."""
    axis: str
    """dp, fsdp or tp."""
    size: float
    """Bytes of the complete tensor."""
    local: float = 0.0
    """Seconds in which ranks pack and unpack what they send."""


@dataclass(frozen=True)
class LayerWork:
    """Work of one layer on one rank."""

    forward: float
    """Seconds of computing in forward."""
    backward: float
    """Seconds of computing in backward, without the products in `beside`."""
    forward_sent: tuple[Message, ...] = ()
    """Messages that forward waits for."""
    backward_sent: tuple[Message, ...] = ()
    """Messages that backward waits for."""
    beside: tuple[tuple[float, tuple[Message, ...]], ...] = ()
    """Products in backward as (seconds, messages sent meanwhile)."""
    gather: Message | None = None
    """Gathering of the parameters."""
    gathers_each: bool = False
    """Whether every forward gathers them, not only that of the step's first micro-batch."""
    gathers_back: bool = False
    """Whether every backward gathers them, too."""
    reduce: tuple[Message, ...] = ()
    """Reduction of the gradients, in this order, from the last micro-batch's backward on."""
    reduces_at_end: bool = False
    """Whether the reduction begins after the stage's last backward, which waits for it."""


@dataclass(frozen=True)
class Step:
    """Work of a step."""

    plan: Plan
    """Uniform plan under gpipe or 1f1b, or without a pipeline."""
    stages: tuple[tuple[LayerWork, ...], ...]
    """Layers of each stage, in forward order."""
    microbatches: int
    """Number of micro-batches."""
    sent: float
    """Bytes that a rank sends to the next stage for each micro-batch."""
    overhead: float
    """Seconds of a micro-batch in addition to its layers."""
    optimizer: tuple[float, ...]
    """Seconds of the optimizer of each stage."""


SHARES = {
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
    "all_gather": lambda n: (n - 1, (n - 1) / n),
    "reduce_scatter": lambda n: (n - 1, (n - 1) / n),
}
"""Rings of n ranks: (consecutive messages, share of the tensor that passes each rank)."""


@dataclass(eq=False)
class Operation:
    """A collective, or a message between two ranks."""

    members: tuple[int, ...]
    """Ranks; (sender, receiver) of a message."""
    waits_for: set[int]
    """Ranks that have not posted it."""
    volume: float = 0.0
    """Bytes that are still to pass each wire."""
    delay: float = 0.0
    """Seconds before bytes flow."""
    after: list[Operation] = field(default_factory=list)
    """Operations that end before it begins."""
    done: bool = False
    """Whether it has ended."""
    waiting: list[int] = field(default_factory=list)
    """Ranks that wait for its end."""
    begun: bool = False
    """Whether its delay has begun."""


Program = Generator[tuple[str, object], Operation | None, None]
"""A rank's step: it yields commands, and posting returns the operation."""


class Replay:
    """Simulation of one step."""

    def __init__(self, machine: Machine, step: Step) -> None:
        self.machine, self.step, plan = machine, step, step.plan
        axes = [(axis.role, axis.size) for axis in plan.strategy.axes]
        axes.insert(plan.pp_index, ("pp", plan.pipeline_degree))
        self._places = [_place(rank, axes) for rank in range(plan.world_size)]
        self._groups: dict[tuple[str, int], tuple[int, ...]] = {}
        self._streams: defaultdict[tuple[int, ...], list[Operation]] = defaultdict(list)
        self._ended: Counter[tuple[int, ...]] = Counter()
        self._posted: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._routes: dict[tuple[int, ...], dict[tuple[str, int, int], float]] = {}
        self._rates: dict[tuple[tuple[int, ...], ...], list[float]] = {}
        self._flows: list[Operation] = []
        self._events: list[tuple[float, int, int | Operation]] = []
        self.now, self._number = 0.0, 0
        self._programs: list[Program] = [self._program(rank) for rank in range(plan.world_size)]

    def seconds(self) -> float:
        """Return the seconds of the step."""
        for rank in range(len(self._programs)):
            self._resume(rank, None)
        while self._events or self._flows:
            rates = self._flow_rates()
            ends = [flow.volume / rate if rate else math.inf for flow, rate in zip(self._flows, rates, strict=True)]
            moment = min(self._events[0][0] if self._events else math.inf, self.now + min(ends, default=math.inf))
            assert moment < math.inf, "the step deadlocks"
            past, self.now = moment - self.now, moment
            same = 1e-12 * max(1e-3, moment)
            over = [flow for flow, end in zip(self._flows, ends, strict=True) if end - past <= same]
            for flow, rate in zip(self._flows, rates, strict=True):
                flow.volume -= rate * past
            self._flows = [flow for flow in self._flows if flow not in over]
            due: list[int | Operation] = []
            while self._events and self._events[0][0] - moment <= same:
                due.append(heappop(self._events)[2])
            for flow in over:
                self._end(flow)
            for what in due:
                if isinstance(what, int):
                    self._resume(what, None)
                elif what.volume:
                    self._flows.append(what)
                else:
                    self._end(what)
        assert not any(program.gi_frame for program in self._programs), "the ranks deadlock"
        return self.now

    # Programs of the ranks

    def _program(self, rank: int) -> Program:
        step, plan = self.step, self.step.plan
        stage, stages, last = self._places[rank]["pp"], plan.pipeline_degree, step.microbatches - 1
        layers = step.stages[stage]
        reductions: list[Operation] = []
        for kind, number in self._actions(stage):
            if kind == "F":
                if stage:
                    yield "wait", self._message(self._peer(rank, -1), rank, number)
                yield from self._forward(rank, layers, number == 0)
            else:
                if stage < stages - 1:
                    yield "wait", self._message(self._peer(rank, +1), rank, number)
                yield from self._backward(rank, layers, number == last, reductions)
            if stages > 1:
                yield "compute", step.overhead / 2
                if 0 <= (peer := stage + (1 if kind == "F" else -1)) < stages:
                    yield "send", (self._message(rank, self._peer(rank, peer - stage), number), step.sent)
            elif kind == "B":
                yield "compute", step.overhead
        for operation in reductions:
            yield "wait", operation
        if plan.world_size > 1:  # norm of the gradients
            operation = yield "post", (tuple(range(plan.world_size)), Message("all_reduce", "all", 8), ())
            yield "wait", operation
        yield "compute", step.optimizer[stage]

    def _actions(self, stage: int) -> list[tuple[str, int]]:
        """Return (F or B, micro-batch) in the order of the schedule."""
        plan, count = self.step.plan, self.step.microbatches
        forwards, backwards = ([(kind, number) for number in range(count)] for kind in "FB")
        if plan.pipeline_degree > 1 and plan.schedule == "gpipe":
            return forwards + backwards
        assert plan.pipeline_degree == 1 or plan.schedule == "1f1b", f"{plan.schedule} is not replayed"
        early = min(plan.pipeline_degree - 1 - stage, count)
        pairs = [action for pair in zip(forwards[early:], backwards, strict=False) for action in pair]
        return forwards[:early] + pairs + backwards[count - early :]

    def _forward(self, rank: int, layers: Sequence[LayerWork], first: bool) -> Program:
        gathers = [layer.gather is not None and (first or layer.gathers_each) for layer in layers]
        fetched: dict[int, Operation] = {}
        for number, layer in enumerate(layers):
            yield from self._gather(rank, layers, gathers, fetched, number, number + 1)
            yield from self._in_turns(rank, layer.forward, layer.forward_sent)

    def _backward(self, rank: int, layers: Sequence[LayerWork], last: bool, reductions: list[Operation]) -> Program:
        gathers, fetched = [layer.gathers_back for layer in layers], dict[int, Operation]()
        for number in reversed(range(len(layers))):
            layer = layers[number]
            yield from self._gather(rank, layers, gathers, fetched, number, number - 1)
            part = layer.backward / max(1, len(layer.beside))
            for seconds, messages in layer.beside:
                yield "compute", part
                posted = []
                for message in messages:
                    posted.append((yield from self._post(rank, message)))
                yield "compute", seconds
                for operation in posted:
                    yield "wait", operation
            yield from self._in_turns(rank, 0.0 if layer.beside else part, layer.backward_sent)
            if last and not layer.reduces_at_end:
                yield from self._reduce(rank, layer, reductions)
        if last:
            for layer in reversed(layers):
                if layer.reduces_at_end:
                    yield from self._reduce(rank, layer, reductions)
            if any(layer.reduces_at_end for layer in layers):
                for operation in reductions:
                    yield "wait", operation

    def _in_turns(self, rank: int, seconds: float, messages: Sequence[Message]) -> Program:
        """Compute in equal parts, each before a message that the rank waits for."""
        parts = max(1, len(messages))
        for number in range(parts):
            yield "compute", seconds / parts
            if messages:
                yield "wait", (yield from self._post(rank, messages[number]))

    def _gather(
        self,
        rank: int,
        layers: Sequence[LayerWork],
        gathers: list[bool],
        fetched: dict[int, Operation],
        number: int,
        following: int,
    ) -> Program:
        for wanted in (number, following):
            if 0 <= wanted < len(layers) and gathers[wanted] and wanted not in fetched:
                message = layers[wanted].gather
                assert message is not None
                fetched[wanted] = yield from self._post(rank, message)
            if wanted == number and number in fetched:
                yield "wait", fetched[number]

    def _reduce(self, rank: int, layer: LayerWork, reductions: list[Operation]) -> Program:
        before: tuple[Operation, ...] = ()
        for message in layer.reduce:
            before = ((yield from self._post(rank, message, before)),)
        reductions += before

    def _post(
        self, rank: int, message: Message, after: tuple[Operation, ...] = ()
    ) -> Generator[tuple[str, object], Operation | None, Operation]:
        operation = yield "post", (self._group(rank, message.axis), message, after)
        assert operation is not None
        return operation

    # Groups and messages

    def _group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axis` at most."""
        if (axis, rank) not in self._groups:
            mine = {**self._places[rank], axis: 0}
            same = tuple(n for n, place in enumerate(self._places) if {**place, axis: 0} == mine)
            self._groups.update({(axis, n): same for n in same})
        return self._groups[axis, rank]

    def _peer(self, rank: int, by: int) -> int:
        """Return the rank `by` stages behind."""
        place = {**self._places[rank], "pp": self._places[rank]["pp"] + by}
        return self._places.index(place)

    def _message(self, source: int, target: int, number: int) -> Operation:
        """Return message `number` from one rank to another."""
        stream = self._streams[source, target, -1]
        while len(stream) <= number:
            stream.append(Operation((source, target, -1), {source}))
        return stream[number]

    # Simulation

    def _resume(self, rank: int, given: Operation | None) -> None:
        """Run a rank until it computes or waits."""
        program = self._programs[rank]
        while True:
            try:
                command, what = program.send(given)
            except StopIteration:
                return
            given = None
            if command == "compute":
                if what:
                    self._at(self.now + what, rank)
                    return
            elif command == "wait":
                if not what.done:
                    what.waiting.append(rank)
                    return
            elif command == "send":
                operation, size = what
                operation.volume, operation.delay = size, self._latency(operation.members[:2])
                self._ready(operation, rank)
            else:
                given = self._join(rank, *what)

    def _join(self, rank: int, members: tuple[int, ...], message: Message, after: tuple[Operation, ...]) -> Operation:
        """Post a rank's next operation of a group, and return it."""
        number, stream = self._posted[rank, members], self._streams[members]
        self._posted[rank, members] += 1
        if len(stream) == number:
            messages, share = SHARES[message.operation](len(members))
            # Trees take fewer consecutive messages than rings.
            steps = min(messages, 2 * max(1, len(members).bit_length() - 1))
            delay = message.local + steps * self._latency(members) if len(members) > 1 else message.local
            stream.append(Operation(members, set(members), share * message.size, delay))
        operation = stream[number]
        operation.after += after
        self._ready(operation, rank)
        return operation

    def _ready(self, operation: Operation, rank: int) -> None:
        operation.waits_for.discard(rank)
        for before in operation.after:
            if not before.done:
                before.waiting.append(-1)
        self._begin(operation.members)

    def _begin(self, members: tuple[int, ...]) -> None:
        """Begin the next operation of a stream if all its members are there."""
        stream, number = self._streams[members], self._ended[members]
        if number < len(stream):
            operation = stream[number]
            there = not operation.waits_for and all(before.done for before in operation.after)
            if there and not operation.begun:
                operation.begun = True
                self._at(self.now + operation.delay, operation)

    def _end(self, operation: Operation) -> None:
        operation.done = True
        self._ended[operation.members] += 1
        self._begin(operation.members)
        for rank in operation.waiting:
            if rank < 0:  # an operation of another group waits for this one
                for members in list(self._streams):
                    self._begin(members)
            else:
                self._resume(rank, None)

    def _at(self, moment: float, what: int | Operation) -> None:
        self._number += 1
        heappush(self._events, (moment, self._number, what))

    def _latency(self, members: Sequence[int]) -> float:
        nodes = {rank // self.machine.devices for rank in members}
        return (self.machine.inter if len(nodes) > 1 else self.machine.intra).latency

    def _route(self, members: tuple[int, ...]) -> dict[tuple[str, int, int], float]:
        """Return the part of an operation's bytes on each wire that it uses."""
        if members in self._routes:
            return self._routes[members]
        devices, nics = self.machine.devices, self.machine.nics
        one_way = members[-1] < 0
        ends = {"out": members[:1], "in": members[1:2]} if one_way else {"out": members, "in": members}
        across = len({rank // devices for rank in members if rank >= 0}) > 1
        route: dict[tuple[str, int, int], float] = {}
        for way, ranks in ends.items():
            here = Counter(rank // devices for rank in ranks)
            for rank in ranks:
                node, index = divmod(rank, devices)
                route["device " + way, node, index] = 1.0
                if across:
                    # A ring enters and leaves a node once; its channels are spread over the cards of the members.
                    card = "card " + way, node, index * nics // devices
                    route[card] = route.get(card, 0.0) + 1 / here[node]
        self._routes[members] = route
        return route

    def _flow_rates(self) -> list[float]:
        """Return the bytes per second of each flow."""
        key = tuple(flow.members for flow in self._flows)
        if key not in self._rates:
            routes = [self._route(members) for members in key]
            self._rates[key] = self._shared(key, routes)
        return self._rates[key]

    def _capacity(self, wire: tuple[str, int, int]) -> float:
        return (self.machine.inter if wire[0].startswith("card") else self.machine.intra).bandwidth

    def _shared(self, key: tuple[tuple[int, ...], ...], routes: list[dict[tuple[str, int, int], float]]) -> list[float]:
        """Return the max-min fair rates: ranks share a wire evenly, and leave what they cannot use to others."""
        weights = []
        for members in key:
            here = Counter(rank // self.machine.devices for rank in members if rank >= 0)
            weights.append(1.0 if members[-1] < 0 else float(min(here.values())))
        left: defaultdict[tuple[str, int, int], float] = defaultdict(float)
        for route in routes:
            for wire in route:
                left[wire] = self._capacity(wire)
        rates, open_flows = [0.0] * len(routes), set(range(len(routes)))
        while open_flows:
            asked: defaultdict[tuple[str, int, int], float] = defaultdict(float)
            for flow in open_flows:
                for wire, part in routes[flow].items():
                    asked[wire] += weights[flow] * part
            level = min(left[wire] / demand for wire, demand in asked.items())
            full = {wire for wire, demand in asked.items() if left[wire] / demand <= level * (1 + 1e-9)}
            for flow in [flow for flow in open_flows if not full.isdisjoint(routes[flow])]:
                rates[flow] = weights[flow] * level
                for wire, part in routes[flow].items():
                    left[wire] = max(0.0, left[wire] - rates[flow] * part)
                open_flows.remove(flow)
        return rates


def _place(rank: int, axes: list[tuple[str, int]]) -> dict[str, int]:
    """Return a rank's index along each axis, of which the last varies fastest."""
    place = {}
    for role, size in reversed(axes):
        rank, place[role] = divmod(rank, size)
    return place
