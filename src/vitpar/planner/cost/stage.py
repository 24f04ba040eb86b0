"""Cost of one pipeline stage: replay the forward and backward of a micro-batch on one rank.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitpar.models.description import TensorSpec
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.links import Links, RankGroup
from vitpar.planner.cost.records import LayerParameters, PlacedStrategy, Work
from vitpar.planner.cost.streams import Streams, Transfer
from vitpar.planner.profile.profiles import LayerKind
from vitpar.strategy import Strategy, token_layout
from vitpar.strategy.execution import LayerExecution
from vitpar.strategy.layout import Layout, received_share


@dataclass(frozen=True)
class StageLayer:
    """One layer of a stage with its costs."""

    kind: LayerKind
    """Kind of layer."""
    strategy: Strategy
    """Strategy of the layer."""
    work: Work
    """Time and memory of one micro-batch."""
    weights: LayerParameters
    """Sizes and communication of the parameters."""
    execution: LayerExecution
    """When parameters are gathered and gradients reduced."""
    moved: tuple[float, float] = (0.0, 0.0)
    """Seconds to redistribute the layer's input: (activations in forward, their gradients in backward)."""


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
            skew, wire = layer.work.skew[0], self._wire(layer)
            for share in self._parts(layer):
                streams.compute(share * layer.work.forward, "forward", skew * share**0.5)
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
            skew, wire = layer.work.skew[1], self._wire(layer)
            for share in self._parts(layer):
                streams.compute(share * (layer.work.backward - layer.work.beside), "backward", skew * share**0.5)
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
    costed, layout = [], taken
    for kind, strategy in layers:
        wanted, position = token_layout(strategy), costs.position(strategy, where)
        costed.append(
            StageLayer(
                kind,
                strategy,
                costs.work(kind, position, rows),
                costs.weights(kind, position),
                position.executions[kind],
                moving(
                    costs,
                    costs.config.kinds[kind].takes,
                    layout,
                    wanted,
                    rows,
                    position.groups.stage,
                    back=position.executions[kind].passes_gradient,
                ),
            )
        )
        layout = wanted
    last = costs.position(layers[-1][1], where)
    after = (0.0, 0.0)
    if given is not None:
        back = last.executions[layers[-1][0]].backward != "nothing"
        after = moving(
            costs, costs.config.kinds[layers[-1][0]].gives, layout, given, rows, last.groups.stage, back=back
        )
    return StageCost(_with_kept(costs, costed, rows), after, in_order=costs.hardware.device == "cpu")


def _with_kept(costs: LayerCosts, layers: Sequence[StageLayer], rows: int) -> tuple[StageLayer, ...]:
    """Return the layers of a stage with the activations that frozen ones give and that stay alive.

    These are the input of the lowest trained layer, and what the stage sends, which torch keeps until the action of its
    backward.
    """
    updated = list(layers)
    for number, layer in enumerate(layers):
        if layer.execution.backward != "nothing":
            continue
        if number + 1 == len(layers) or layers[number + 1].execution.backward != "nothing":
            shape, part = costs.config.kinds[layer.kind].gives, token_layout(layer.strategy)[0]
            kept = rows * part.share * shape.elements * costs.precision.compute.itemsize
            updated[number] = replace(layer, work=replace(layer.work, saved=kept))
    return tuple(updated)


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
