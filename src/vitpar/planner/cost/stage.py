"""The layers of one pipeline stage: how long a rank takes for a micro-batch, forward and backward; and from the same
pieces what a layer takes at least in any plan, by which a search bounds plans.

What is sent beside computing is as the runtime sends it:

| what                                 | on a CPU (gloo)   | on GPUs (nccl)                                |
|--------------------------------------|-------------------|-----------------------------------------------|
| activations along tensor axes,       | the rank waits    | the rank waits                                |
| between unlike layouts               |                   |                                               |
| gathering parameters                 | the rank waits    | beside the layer before                       |
| gradients of wrapped layers          | the rank waits    | beside the next layers; under pp it waits     |
| gradients of plain layers            | beside the next layers; at the end where backward is split        |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitpar.planner.cost.layer import LayerCosts, LayerParameters, PipelinePosition, PlacedStrategy, Work
from vitpar.planner.cost.links import Links, RankGroup
from vitpar.planner.cost.streams import Streams, Transfer
from vitpar.planner.profile.profiles import LayerKind
from vitpar.strategy import Strategy, token_layout
from vitpar.strategy.execution import LayerExecution
from vitpar.strategy.layout import Layout, received_share


@dataclass(frozen=True)
class StageLayer:
    """One layer of a stage. execution: what a step does with its parameters and gradients. moved: seconds to
    redistribute what comes in, forward and backward."""

    kind: LayerKind
    strategy: Strategy
    work: Work
    weights: LayerParameters
    execution: LayerExecution
    moved: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class StageCost:
    """The layers of a stage as a rank runs them.

    after: seconds to redistribute what goes out. in_order: whether communication waits for nothing else (gloo).
    """

    layers: tuple[StageLayer, ...]
    after: tuple[float, float] = (0.0, 0.0)
    in_order: bool = False

    def forward(self, streams: Streams, first: bool) -> None:
        """A micro-batch. first: of the step."""
        gathers = [
            layer.execution.wrapped and (first or layer.execution.gathers_every_forward) for layer in self.layers
        ]
        jobs: dict[int, Transfer] = {}
        for number, layer in enumerate(self.layers):
            streams.block(layer.moved[0], "redistribution")
            self._gather(streams, jobs, gathers, number, +1)
            streams.compute(layer.work.forward, "forward", layer.work.skew[0])
            streams.block(layer.work.forward_sent, "tensor")
        streams.block(self.after[0], "redistribution")

    def backward(self, streams: Streams, last: bool) -> None:
        """Replay the backward of one micro-batch.

        last: whether it is the last micro-batch of the step.
        """
        gathers = [layer.execution.gathers_in_backward for layer in self.layers]
        jobs: dict[int, Transfer] = {}
        streams.block(self.after[1], "redistribution")
        for number in reversed(range(len(self.layers))):
            layer = self.layers[number]
            self._gather(streams, jobs, gathers, number, -1)
            streams.compute(layer.work.backward, "backward", layer.work.skew[1])
            streams.block(layer.work.backward_sent, "tensor")
            self._reduce(streams, layer, last)
            streams.block(layer.moved[1], "redistribution")
        if last:
            at_end = [layer for layer in self.layers if layer.execution.reduced == "end of step"]
            streams.block(sum(layer.weights.reduce for layer in at_end if layer.execution.wrapped), "gradients")
            for layer in at_end:
                if not layer.execution.wrapped:
                    streams.send(layer.weights.reduce)

    def late(self, first: bool) -> float:
        """Seconds of backward that may come later than the rest. first: whether it is the first stage, which computes
        all of it then."""
        return sum(layer.work.backward if first else layer.work.weight_grad_time for layer in self.layers)

    def _gather(self, streams: Streams, jobs: dict[int, Transfer], gathers: list[bool], number: int, way: int) -> None:
        """Wait for the parameters of a layer, and ask for those of the next."""
        if self.in_order:
            if gathers[number]:
                streams.block(self.layers[number].weights.gather, "gather")
            return
        for wanted in (number, number + way):
            if 0 <= wanted < len(gathers) and gathers[wanted] and wanted not in jobs:
                jobs[wanted] = streams.send(self.layers[wanted].weights.gather)
            if wanted == number and number in jobs:
                streams.wait(jobs[number], "gather")

    def _reduce(self, streams: Streams, layer: StageLayer, last: bool) -> None:
        if layer.execution.reduced == "every micro-batch" or (last and layer.execution.reduced == "last micro-batch"):
            if layer.execution.wrapped and self.in_order:
                streams.block(layer.weights.reduce, "gradients")
            else:
                streams.send(layer.weights.reduce)


def build_stage(
    costs: LayerCosts,
    layers: Sequence[tuple[LayerKind, Strategy]],
    rows: int,
    where: PlacedStrategy,
    *,
    taken: Layout | None = None,
    given: Layout | None = None,
) -> StageCost:
    """The stage of `layers`, in order, for micro-batches of `rows` images.

    taken, given: the layouts in which tokens come from the stage before and go on to the next, None where there is
    none.
    """
    found, layout = [], taken
    for kind, strategy in layers:
        wanted, seat = token_layout(strategy), costs.seat(strategy, where)
        found.append(
            StageLayer(
                kind,
                strategy,
                costs.work(kind, seat, rows),
                costs.weights(kind, seat),
                seat.executions[kind],
                moving(costs, layout, wanted, rows, seat.groups.stage),
            )
        )
        layout = wanted
    stage = costs.seat(layers[-1][1], where).groups.stage
    return StageCost(
        tuple(found),
        after=moving(costs, layout, given, rows, stage) if given is not None else (0.0, 0.0),
        in_order=costs.hardware.device == "cpu",
    )


def moving(
    costs: LayerCosts, source: Layout | None, target: Layout, rows: int, stage: RankGroup
) -> tuple[float, float]:
    """Seconds to redistribute a micro-batch's tokens, forward and the gradients backward."""
    if source is None or source == target:
        return 0.0, 0.0
    whole = rows * costs.config.tokens * costs.config.embed_dim * costs.precision.compute.itemsize
    there, back = received_share(source, target), received_share(target, source)
    return _exchanged(costs.links, stage, there * whole), _exchanged(costs.links, stage, back * whole)


def _exchanged(links: Links, stage: RankGroup, received: float) -> float:
    """The link's size is what a rank holds, of which it receives all but its own part."""
    return links.seconds("all_to_all", stage, received * stage.ranks / (stage.ranks - 1))


@dataclass(frozen=True)
class Load:
    """Lower bounds of one layer's time and memory, which add up over layers."""

    forward: float = 0.0
    """Seconds of computing forward."""
    computes: float = 0.0
    """Seconds of computing forward and backward, with the mean skew between ranks where they meet after every action.
    """
    late: float = 0.0
    """Seconds of backward that a zero-bubble schedule may run later."""
    waits: float = 0.0
    """Seconds of waiting per micro-batch."""
    once: float = 0.0
    """Seconds once per step, those of the optimizer included."""
    waits_once: float = 0.0
    """Seconds of waiting for other ranks once per step."""
    edge: float = 0.0
    """Seconds once per step that nothing overlaps: gathering the first layer, reducing its gradients."""
    sent_each: float = 0.0
    """Seconds of background communication per micro-batch."""
    sent_once: float = 0.0
    """Seconds of background communication once per step."""
    sent_early: float = 0.0
    """Seconds of `sent_once` that the first forward waits for."""
    sent_late: float = 0.0
    """Seconds of `sent_once` that begin in the last micro-batch's backward."""
    kept: float = 0.0
    """Bytes kept all the time."""
    reduced: float = 0.0
    """Bytes of gradients when the optimizer steps."""
    gathered: float = 0.0
    """Bytes kept during a step."""
    gradients: float = 0.0
    """Bytes of gradients after the first backward."""
    saved: float = 0.0
    """Bytes per micro-batch kept between forward and backward."""
    working: float = 0.0
    """Transient bytes while the layer's backward is computed or its gradients are reduced; these do not add up over
    layers."""
    fresh: float = 0.0
    """Transient bytes of new gradients in the step's first backward."""
    working_once: float = 0.0
    """`working` and `fresh` together, for a step with a single backward."""


def least_load(
    costs: LayerCosts,
    kind: LayerKind,
    seat: PipelinePosition,
    rows: int,
    moments: float,
    update: float,
    pipelined: bool,
) -> Load:
    """Return the least that a layer costs in any plan: the pieces that `StageCost` replays, at the same times.

    rows: images of a micro-batch per stage.
    moments: bytes that the optimizer keeps for every byte of parameters.
    update: seconds of the optimizer per element on the device.
    pipelined: whether there are other stages.
    """
    work, weights, execution = costs.work(kind, seat, rows), costs.weights(kind, seat), seat.executions[kind]
    in_order, every = costs.hardware.device == "cpu", execution.reduced == "every micro-batch"
    gathers = weights.gather * (execution.gathers_every_forward + execution.gathers_in_backward)
    gathers_once = weights.gather * (execution.wrapped and not execution.gathers_every_forward)
    waits = work.forward_sent + work.backward_sent
    once = edge = sent_each = sent_once = sent_early = sent_late = skew = 0.0
    if kind == "embed" and not pipelined:
        edge = weights.reduce * (not in_order or not execution.wrapped) + weights.gather * (not in_order)
    if not execution.wrapped:
        sent_once = sent_late = weights.reduce
    elif in_order:
        waits += gathers + weights.reduce * every
        once = gathers_once + weights.reduce * (not every)
    else:
        sent_each = gathers + weights.reduce * every
        sent_late = weights.reduce * (execution.reduced == "last micro-batch")
        sent_early = gathers_once
        sent_once = sent_early + sent_late
        once = weights.reduce * (execution.reduced == "end of step")
    if pipelined:  # the ranks meet after every action, where layers' skews add up as random numbers do
        skew = sum(work.skew) / (costs.config.depth + 2) ** 0.5
    workspace = work.workspace + weights.gathered * 2 * execution.reshard_after_forward
    fresh, reducing = weights.unreduced_grad_bytes if execution.wrapped else weights.local_bytes, 0.0
    if execution.reduced != "end of step" if execution.wrapped else weights.reduce > 0:
        reducing = weights.reducing + 2 * fresh
    shard, update = (0.0, costs.update(1, True)) if weights.offloaded else (weights.local_bytes, update)
    return Load(
        forward=work.forward,
        computes=work.forward + work.backward + skew,
        late=work.weight_grad_time,
        waits=waits,
        once=weights.elements * update,
        waits_once=once,
        edge=edge,
        sent_each=sent_each,
        sent_once=sent_once,
        sent_early=sent_early,
        sent_late=sent_late,
        kept=shard * (1 + moments),
        reduced=shard,
        gathered=0.0 if execution.reshard_after_forward else weights.gathered,
        gradients=weights.unreduced_grad_bytes if execution.wrapped and not every else shard,
        saved=work.saved,
        working=max(workspace, (weights.reducing + fresh - work.saved) * (execution.wrapped and every)),
        fresh=fresh,
        working_once=max(workspace + fresh, reducing - work.saved),
    )
