"""The layers of one pipeline stage: how long a rank takes for a micro-batch, forward and backward.

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

from vitpar.planner.cost.groups import Group
from vitpar.planner.cost.layer import LayerCosts, Placement, Weights, Work, gathers_always
from vitpar.planner.cost.links import Links
from vitpar.planner.cost.streams import Job, Streams
from vitpar.planner.profile.model import LayerKind
from vitpar.strategy import Strategy, token_layout
from vitpar.strategy.layout import Layout, received_share, shards_as_fsdp


@dataclass(frozen=True)
class StageLayer:
    """One layer of a stage. moved: seconds to redistribute what comes in, forward and backward."""

    kind: LayerKind
    strategy: Strategy
    work: Work
    weights: Weights
    always: bool
    moved: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Stage:
    """The layers of a stage as a rank runs them.

    after: seconds to redistribute what goes out. pipelined: whether there are others. in_order: whether communication
    waits for nothing else (gloo). splits: whether backward comes in two parts.
    """

    layers: tuple[StageLayer, ...]
    after: tuple[float, float] = (0.0, 0.0)
    pipelined: bool = False
    in_order: bool = False
    splits: bool = False

    def forward(self, streams: Streams, first: bool) -> None:
        """A micro-batch. first: of the step."""
        gathers = [layer.weights.wrapped and (first or self._gathered_anew(layer)) for layer in self.layers]
        jobs: dict[int, Job] = {}
        for number, layer in enumerate(self.layers):
            streams.block(layer.moved[0], "redistribution")
            self._gather(streams, jobs, gathers, number, +1)
            streams.compute(layer.work.forward, "forward", layer.work.skew[0])
            streams.block(layer.work.forward_sent, "tensor")
        streams.block(self.after[0], "redistribution")

    def backward(self, streams: Streams, last: bool) -> None:
        """Of the same. last: of the step."""
        gathers = [layer.weights.wrapped and layer.always for layer in self.layers]
        jobs: dict[int, Job] = {}
        streams.block(self.after[1], "redistribution")
        for number in reversed(range(len(self.layers))):
            layer = self.layers[number]
            self._gather(streams, jobs, gathers, number, -1)
            streams.compute(layer.work.backward, "backward", layer.work.skew[1])
            streams.block(layer.work.backward_sent, "tensor")
            self._reduce(streams, layer, last)
            streams.block(layer.moved[1], "redistribution")
        if last and self.pipelined:
            waited = sum(
                layer.weights.reduce for layer in self.layers if layer.weights.wrapped and layer.strategy.zero != 2
            )
            streams.block(waited, "gradients")
        if last and self.splits:
            for layer in self.layers:
                if not layer.weights.wrapped:
                    streams.send(layer.weights.reduce)

    def _gathered_anew(self, layer: StageLayer) -> bool:
        """Whether every forward gathers its parameters. The head keeps them for backward, then FSDP2 drops them."""
        return layer.always or (layer.kind == "head" and not self.pipelined and shards_as_fsdp(layer.strategy))

    def late(self, first: bool) -> float:
        """Seconds of backward that may come later than the rest. first: whether it is the first stage, which computes
        all of it then."""
        return sum(layer.work.backward if first else layer.work.late for layer in self.layers)

    def _gather(self, streams: Streams, jobs: dict[int, Job], gathers: list[bool], number: int, way: int) -> None:
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
        weights = layer.weights
        if not weights.wrapped:
            if last and not self.splits:
                streams.send(weights.reduce)
        elif layer.strategy.zero == 2 or (last and not self.pipelined):
            if self.in_order:
                streams.block(weights.reduce, "gradients")
            else:
                streams.send(weights.reduce)


def build_stage(
    costs: LayerCosts,
    layers: Sequence[tuple[LayerKind, Strategy]],
    rows: int,
    where: Placement,
    *,
    taken: Layout | None = None,
    given: Layout | None = None,
    splits: bool = False,
) -> Stage:
    """The stage of `layers`, in order, for micro-batches of `rows` images.

    taken, given: the layouts in which tokens come from the stage before and go on to the next, None where there is
    none. splits: whether backward comes in two parts.
    """
    pipelined = where.pp > 1
    found, layout = [], taken
    for kind, strategy in layers:
        wanted, seat = token_layout(strategy), costs.seat(strategy, where)
        found.append(
            StageLayer(
                kind,
                strategy,
                costs.work(kind, seat, rows),
                costs.weights(kind, seat),
                gathers_always(strategy, pipelined, kind),
                moving(costs, layout, wanted, rows, seat.groups.stage),
            )
        )
        layout = wanted
    stage = costs.seat(layers[-1][1], where).groups.stage
    return Stage(
        tuple(found),
        after=moving(costs, layout, given, rows, stage) if given is not None else (0.0, 0.0),
        pipelined=pipelined,
        in_order=costs.hardware.device == "cpu",
        splits=splits,
    )


def moving(costs: LayerCosts, source: Layout | None, target: Layout, rows: int, stage: Group) -> tuple[float, float]:
    """Seconds to redistribute a micro-batch's tokens, forward and the gradients backward."""
    if source is None or source == target:
        return 0.0, 0.0
    whole = rows * costs.config.tokens * costs.config.width * costs.numbers.compute.itemsize
    there, back = received_share(source, target), received_share(target, source)
    return _exchanged(costs.links, stage, there * whole), _exchanged(costs.links, stage, back * whole)


def _exchanged(links: Links, stage: Group, received: float) -> float:
    """The link's size is what a rank holds, of which it receives all but its own part."""
    return links.seconds("all_to_all", stage, received * stage.ranks / (stage.ranks - 1))
