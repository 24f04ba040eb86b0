"""Cost of one pipeline stage: replay the forward and backward of a micro-batch on the clock of one rank, `Streams`.

`vitpar.planner.search.loads` sums the same terms into lower bounds of a layer's cost, by which the search skips plans.

Communication overlaps with computing where the runtime overlaps it:

| communication                             | on a CPU (gloo)     | on GPUs (nccl)                                    |
|-------------------------------------------|---------------------|---------------------------------------------------|
| activations: along tensor axes            | blocks; in backward, what a linear layer gathers or sums for one of its |
|                                           | gradients overlaps with the product of the other                        |
| activations: between different layouts    | blocks              | blocks                                            |
| all-gather of parameters                  | blocks              | overlaps with the previous layer                  |
| gradients of layers under ``fully_shard`` | blocks              | overlaps with the following layers; blocks in a   |
|                                           |                     | pipeline, at the end of the step                  |
| gradients of other layers                 | overlaps with the following layers; at the end of the step if the       |
|                                           | schedule splits backward                                                |

On GPUs, what one group of ranks sends overlaps with what another one sends: each at its full speed if one is within a
node and the other one is not, else they share the wire.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitpar.models.description import TensorSpec
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.links import Links, RankGroup
from vitpar.planner.cost.records import PlacedStrategy, StageLayer
from vitpar.planner.profile.profiles import LayerKind, Overlap
from vitpar.strategy import Strategy, token_layout
from vitpar.strategy.layout import Layout, received_share


class Transfer:
    """A background transfer.

    seconds: duration at full speed.
    across: whether it is sent over the wire to other nodes.
    after: transfer that ends before this one begins; None for none.
    """

    __slots__ = ("across", "after", "left")

    def __init__(self, seconds: float, across: bool, after: Transfer | None) -> None:
        self.left, self.across, self.after = seconds, across, after


LANES = ("shards", "replicas")
"""Communicators of background transfers: ranks that shard parameters, and ranks that hold copies of them."""


class Streams:
    """Clock of a rank: `at` holds the seconds so far, `spent` the same seconds by purpose.

    `crossing` holds those in which something is sent to other nodes. The background transfers of a lane run one after
    the other, in the order in which they were sent. Whatever is sent at the same time over one of the two wires, within
    the node or to other nodes, shares it evenly.

    overlap: factors by which computing and communication slow down while both are busy; None for 1.
    """

    def __init__(self, overlap: Overlap | None) -> None:
        self._compute = overlap.compute if overlap else 1.0
        self._communication = overlap.communication if overlap else 1.0
        self._queues: dict[str, deque[Transfer]] = {lane: deque() for lane in LANES}
        self.at = 0.0
        self.crossing = 0.0
        self.spent: defaultdict[str, float] = defaultdict(float)

    def compute(self, seconds: float, what: str) -> None:
        """Compute, while background transfers progress.

        seconds: duration without transfers.
        what: purpose to book the time under.
        """
        begun = self.at
        while seconds > 0 and (heads := self._heads()):
            rates = self._rates(heads, 1 / self._communication)
            took = min(seconds * self._compute, self._first(heads, rates))
            seconds -= took / self._compute
            self._advance(took, heads, rates)
        self.at += max(0.0, seconds)
        self._book(what, begun)

    def send(
        self, seconds: float, lane: str = "replicas", across: bool = False, after: Transfer | None = None
    ) -> Transfer:
        """Queue a background transfer and return it; parameters as of `Transfer`.

        lane: communicator, one of `LANES`.
        """
        job = Transfer(seconds, across, after)
        if seconds > 0:
            self._queues[lane].append(job)
        return job

    def wait(self, job: Transfer | None, what: str) -> None:
        """Wait until `job` is done, or all transfers if it is None; all of the time is booked under `what`."""
        begun = self.at
        while (job is None or job.left > 0) and (heads := self._heads()):
            rates = self._rates(heads)
            self._advance(self._first(heads, rates), heads, rates)
        self.spent[what] += self.at - begun

    def block(self, seconds: float, what: str, across: bool | None = None) -> None:
        """Wait `seconds` without computing, as for a collective whose result is needed at once.

        across: whether the wire to other nodes is used, which background transfers share. They make no progress at all
            if it is None.
        """
        begun = self.at
        while across is not None and seconds > 0 and (heads := self._heads()):
            rates = self._rates(heads, across=across)
            speed = 1 / (1 + sum(head.across == across for head in heads))
            took = min(seconds / speed, self._first(heads, rates))
            seconds -= took * speed
            self._advance(took, heads, rates, bool(across))
        self.at += max(0.0, seconds)
        self.crossing += max(0.0, seconds) * bool(across)
        self._book(what, begun)

    def _book(self, what: str, begun: float) -> None:
        """Book the time since `begun` under a purpose."""
        self.spent[what] += self.at - begun

    @property
    def backlog(self) -> dict[tuple[str, bool], float]:
        """Seconds that the queued background transfers still take at full speed, by (lane, whether across nodes)."""
        seconds: defaultdict[tuple[str, bool], float] = defaultdict(float)
        for lane, queue in self._queues.items():
            for job in queue:
                seconds[lane, job.across] += job.left
        return dict(seconds)

    @property
    def left(self) -> float:
        """Seconds until all background transfers are done, at least: those of the wire with more of them."""
        wires = [0.0, 0.0]
        for (_, across), seconds in self.backlog.items():
            wires[across] += seconds
        return max(wires)

    def _heads(self) -> list[Transfer]:
        """Return the transfers that are being sent: the first of each lane, if what it comes after is done."""
        return [
            queue[0]
            for queue in self._queues.values()
            if queue and (queue[0].after is None or queue[0].after.left <= 0)
        ]

    def _rates(self, heads: list[Transfer], speed: float = 1.0, across: bool | None = None) -> list[float]:
        """Return the speeds of transfers that share wires with each other and with a message `across` or within."""
        if len(heads) == 1 and across is None:
            return [speed]
        busy = [head.across for head in heads] + ([] if across is None else [across])
        return [speed / busy.count(head.across) for head in heads]

    def _first(self, heads: list[Transfer], rates: list[float]) -> float:
        """Return the seconds until the first of some transfers is done."""
        return min(head.left / rate for head, rate in zip(heads, rates, strict=True))

    def _advance(self, seconds: float, heads: list[Transfer], rates: list[float], across: bool = False) -> None:
        """Let `seconds` pass, in which transfers progress; `across` as in `block`."""
        self.at += seconds
        self.crossing += seconds * (across or any(head.across for head in heads))
        for head, rate in zip(heads, rates, strict=True):
            head.left -= seconds * rate
            if head.left <= 1e-15:  # rounding can leave a residue of a finished transfer
                head.left = 0.0
        for queue in self._queues.values():
            while queue and queue[0].left <= 0:
                queue.popleft()


@dataclass(frozen=True)
class StageCost:
    """The layers of a stage in order, as one rank runs them."""

    layers: tuple[StageLayer, ...]
    """Layers in forward order."""
    after: tuple[float, float] = (0.0, 0.0)
    """Seconds to redistribute the stage's output: (activations in forward, their gradients in backward)."""
    in_order: bool = False
    """Whether ``fully_shard`` communicates without overlap, as on gloo."""

    def forward(self, streams: Streams, first: bool) -> None:
        """Replay the forward of one micro-batch.

        streams: clock to advance.
        first: whether it is the first micro-batch of the step.
        """
        gathers = [
            layer.execution.wrapped and (first or layer.execution.gathers_every_forward) for layer in self.layers
        ]
        jobs: dict[int, Transfer] = {}
        for number, layer in enumerate(self.layers):
            streams.block(layer.moved[0], "redistribution")
            self._gather(streams, jobs, gathers, number, +1)
            wire = self._wire(layer)
            for share in self._parts(layer):
                streams.compute(share * layer.work.forward, "forward")
                streams.block(share * layer.work.forward_sent, "tensor", wire)
        streams.block(self.after[0], "redistribution")

    def backward(self, streams: Streams, last: bool) -> None:
        """Replay the backward of one micro-batch.

        streams: clock to advance.
        last: whether it is the last micro-batch of the step.
        """
        gathers = [layer.execution.gathers_in_backward for layer in self.layers]
        jobs: dict[int, Transfer] = {}
        streams.block(self.after[1], "redistribution")
        for number in reversed(range(len(self.layers))):
            layer = self.layers[number]
            if layer.execution.backward == "nothing":
                continue
            self._gather(streams, jobs, gathers, number, -1)
            wire = self._wire(layer)
            for share in self._parts(layer):
                streams.compute(share * (layer.work.backward - layer.work.beside), "backward")
                streams.block(share * layer.work.beside, "backward", wire)
                streams.block(share * layer.work.backward_sent, "tensor", wire)
            self._reduce(streams, layer, last)
            streams.block(layer.moved[1], "redistribution")
        if last:
            at_end = [layer for layer in self.layers if layer.execution.reduced == "end of step"]
            # torch's schedules reduce FSDP modules after the stage's last backward: no computing is left to overlap.
            for weights in (layer.weights for layer in at_end if layer.execution.wrapped):
                shards, copies = (None if self.in_order else a for a in (weights.shard_across, weights.copies_across))
                streams.block(weights.reduce - weights.summed, "gradients", shards)
                streams.block(weights.summed, "gradients", copies)
            # Other layers start asynchronous all-reduces, which outlast the action: `price` adds what is left of them.
            for layer in at_end:
                if not layer.execution.wrapped:
                    streams.send(layer.weights.reduce, across=layer.weights.copies_across)

    def _parts(self, layer: StageLayer) -> tuple[float, ...]:
        """Return the shares of a layer's work after which its activations are sent: on GPUs after attention and MLP."""
        return (1.0,) if self.in_order or not layer.work.forward_sent else (0.5, 0.5)

    def _wire(self, layer: StageLayer) -> bool | None:
        """Return whether a layer's activations are sent across nodes; None if nothing else is sent meanwhile."""
        return None if self.in_order else layer.work.across

    @property
    def passes_gradient(self) -> bool:
        """Return whether the stage's input has a gradient, which is sent back."""
        return self.layers[0].execution.passes_gradient

    @property
    def late(self) -> float:
        """Return the seconds of backward that a schedule with split backward runs in the weight-gradient action (W)."""
        # A stage without gradients of inputs to send skips I and runs its complete backward as W.
        passes = self.passes_gradient
        return sum(layer.work.weight_grad_time if passes else layer.work.backward for layer in self.layers)

    def _gather(self, streams: Streams, jobs: dict[int, Transfer], gathers: list[bool], number: int, way: int) -> None:
        """Wait for the gathered parameters of layer `number`, and start gathering those of the next.

        jobs: transfers started so far, by layer; updated.
        gathers: by layer, whether this pass gathers it.
        way: +1 in forward, -1 in backward.
        """
        if self.in_order:
            if gathers[number]:
                streams.block(self.layers[number].weights.gather, "gather")
            return
        # FSDP2 fetches one layer ahead: the next layer's all-gather runs while this layer computes.
        for wanted in (number, number + way):
            if 0 <= wanted < len(gathers) and gathers[wanted] and wanted not in jobs:
                weights = self.layers[wanted].weights
                jobs[wanted] = streams.send(weights.gather, "shards", weights.shard_across)
            if wanted == number and number in jobs:
                streams.wait(jobs[number], "gather")

    def _reduce(self, streams: Streams, layer: StageLayer, last: bool) -> None:
        """Reduce a layer's gradients if that is due right after its backward."""
        if layer.execution.reduced == "every micro-batch" or (last and layer.execution.reduced == "last micro-batch"):
            # Layers without fully_shard use asynchronous all-reduces, which overlap on gloo too.
            if layer.execution.wrapped and self.in_order:
                streams.block(layer.weights.reduce, "gradients")
            else:
                weights = layer.weights
                scattered = streams.send(weights.reduce - weights.summed, "shards", weights.shard_across)
                streams.send(weights.summed, across=weights.copies_across, after=scattered)


def build_stage(
    costs: LayerCosts,
    layers: Sequence[tuple[LayerKind, Strategy]],
    rows: int,
    where: PlacedStrategy,
    *,
    taken: Layout | None = None,
    given: Layout | None = None,
) -> StageCost:
    """Return the cost of a stage.

    layers: (kind, strategy) of each layer in forward order.
    rows: images of a micro-batch over all ranks of the stage.
    where: position in the pipeline.
    taken: layout of the tokens received from the previous stage; None for the first stage.
    given: layout of the tokens sent to the next stage; None for the last stage.
    """
    costed, layout = list[StageLayer](), taken
    for kind, strategy in layers:
        wanted, position = token_layout(strategy), costs.position(strategy, where)
        back, stage = position.executions[kind].passes_gradient, position.groups.stage
        moved = moving(costs, costs.config.kinds[kind].takes, layout, wanted, rows, stage, back=back)
        work, weights = costs.work(kind, position, rows), costs.weights(kind, position)
        costed.append(StageLayer(kind, position, work, weights, moved))
        layout = wanted
    last, after = costed[-1], (0.0, 0.0)
    if given is not None:
        back, stage = last.execution.backward != "nothing", last.position.groups.stage
        after = moving(costs, costs.config.kinds[last.kind].gives, layout, given, rows, stage, back=back)
    # Of frozen layers, two activations stay alive: the input of the lowest trained layer, and what the stage sends,
    # which torch keeps until the action of its backward.
    for number, layer in enumerate(costed):
        trained_next = layer is last or costed[number + 1].execution.backward != "nothing"
        if layer.execution.backward == "nothing" and trained_next:
            shape, part = costs.config.kinds[layer.kind].gives, token_layout(layer.position.strategy)[0]
            kept = rows * part.share * shape.elements * costs.precision.compute.itemsize
            costed[number] = replace(layer, work=replace(layer.work, saved=kept))
    return StageCost(tuple(costed), after, in_order=costs.hardware.device == "cpu")


def moving(
    costs: LayerCosts,
    shape: TensorSpec | None,
    source: Layout | None,
    target: Layout,
    rows: int,
    stage: RankGroup,
    *,
    back: bool = True,
) -> tuple[float, float]:
    """Return the seconds to redistribute a micro-batch's tokens: (activations forward, their gradients backward).

    shape: activation of an image; None for embed, whose images are loaded in the layout that it takes.
    source: None for embed, too.
    rows: images of the micro-batch over all ranks of the stage.
    stage: the ranks of the stage, which exchange tokens.
    back: whether the activations have gradients.
    """
    if shape is None or source is None or source == target:
        return 0.0, 0.0
    whole = rows * shape.elements * costs.precision.compute.itemsize
    there, again = received_share(source, target), received_share(target, source) * back
    return exchange_seconds(costs.links, stage, there * whole), exchange_seconds(costs.links, stage, again * whole)


def exchange_seconds(links: Links, stage: RankGroup, received: float) -> float:
    """Return the seconds of an all-to-all in which the busiest rank receives `received` bytes."""
    # An all_to_all link counts the bytes that a rank holds, of which it receives (n - 1) / n. A stage of one rank has
    # only one layout, so n > 1.
    return links.seconds("all_to_all", stage, received * stage.ranks / (stage.ranks - 1))
