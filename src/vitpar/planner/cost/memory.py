"""How much memory a rank needs at most: what is alive at every action of a step, in the order of the schedule.

The order of a rank's actions does not depend on how long they take, so neither does its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitpar.parallel.replay import Part
from vitpar.planner.cost.stage import Stage, StageLayer


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at its fullest moment, by what they hold.

    parameters, optimizer: kept for the whole run. gradients: reduced, or waiting to be. gathered: copies of parameters
    to compute with. activations: kept for backward. workspace: what one layer takes while it computes. buffers: what
    comes from other stages, and the step's images. host: in the host's memory (+offload), not in `total`.
    """

    parameters: float
    optimizer: float
    gradients: float
    gathered: float
    activations: float
    workspace: float
    buffers: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """All of it but what the host keeps."""
        parts = self.parameters + self.optimizer + self.gradients + self.gathered
        return parts + self.activations + self.workspace + self.buffers


@dataclass
class Held:
    """What one rank holds for its stages.

    stages: by number. moments: bytes the optimizer keeps for every byte of parameters. buffers: bytes.
    """

    stages: Mapping[int, Stage]
    moments: float
    buffers: float
    microbatches: int

    def at_most(self, actions: Sequence[Sequence[Part]]) -> Memory:
        """The memory of a rank that does `actions` in order."""
        layers = [layer for stage in self.stages.values() for layer in stage.layers]
        held = sum(layer.weights.held for layer in layers if not layer.strategy.offload)
        host = sum(layer.weights.held for layer in layers if layer.strategy.offload)
        walk = _Walk(self.stages, self.microbatches)
        for action in actions:
            for part in action:
                walk.do(*part)
        walk.done()
        return Memory(
            parameters=held,
            optimizer=held * self.moments,
            gradients=walk.most["gradients"],
            gathered=walk.most["gathered"],
            activations=walk.most["activations"],
            workspace=walk.most["workspace"],
            buffers=self.buffers,
            host=host * (2 + self.moments),
        )


class _Walk:
    """Goes through a step's actions and remembers the fullest moment."""

    def __init__(self, stages: Mapping[int, Stage], microbatches: int) -> None:
        self._stages, self._microbatches = stages, microbatches
        self._saved = {number: sum(layer.work.saved for layer in stage.layers) for number, stage in stages.items()}
        self._alive = dict.fromkeys(stages, 0)  # micro-batches between forward and backward
        self._backwards = dict.fromkeys(stages, 0)
        self._gradients: dict[tuple[int, int], float] = {}  # by stage and layer
        self._kept = dict.fromkeys(stages, 0.0)  # copies of parameters, from the first use in the step to the last
        self.most: dict[str, float] = {}
        self._total = -1.0

    def do(self, kind: str, number: int, microbatch: int) -> None:
        """One action for stage `number`."""
        stage = self._stages[number]
        if kind == "F":
            self._kept[number] = sum(layer.weights.gathered for layer in stage.layers if not layer.always)
            before = 0.0
            for layer in stage.layers:
                before += layer.work.saved
                self._moment(activations=before, workspace=layer.work.workspace, gathered=_passing(layer))
            self._alive[number] += 1
        elif kind in ("B", "W"):
            self._backward(number, stage)
        else:  # the gradients of inputs: activations stay for those of weights
            space = max(layer.work.workspace for layer in stage.layers)
            self._moment(workspace=space, gathered=max(_passing(layer) for layer in stage.layers))

    def done(self) -> None:
        """The optimizer's step."""
        self._moment()

    def _backward(self, number: int, stage: Stage) -> None:
        self._backwards[number] += 1
        last = self._backwards[number] == self._microbatches
        self._alive[number] -= 1
        left = self._saved[number]
        for place, layer in reversed(list(enumerate(stage.layers))):
            here, weights = (number, place), layer.weights
            fresh = 0.0 if here in self._gradients else (weights.waiting if weights.wrapped else weights.held)
            space = layer.work.workspace
            self._moment(activations=left, workspace=space, gathered=_passing(layer), gradients=fresh)
            left -= layer.work.saved
            if weights.wrapped and (layer.strategy.zero == 2 or (last and not stage.pipelined)):
                self._moment(activations=left, gradients=fresh + weights.waiting)
                self._gradients[here] = 0.0 if layer.strategy.offload else weights.held
            elif not weights.wrapped:
                self._moment(activations=left, gradients=fresh + (weights.held if last and weights.reduce else 0.0))
                self._gradients[here] = weights.held
            else:
                self._gradients[here] = weights.waiting
        if last and stage.pipelined:
            for place, layer in reversed(list(enumerate(stage.layers))):
                if layer.weights.wrapped:
                    self._moment(gradients=layer.weights.waiting)
                    self._gradients[number, place] = 0.0 if layer.strategy.offload else layer.weights.held
        if last:
            self._kept[number] = 0.0

    def _moment(self, **more: float) -> None:
        parts = {
            "activations": sum(self._alive[n] * self._saved[n] for n in self._stages) + more.get("activations", 0.0),
            "gradients": sum(self._gradients.values()) + more.get("gradients", 0.0),
            "gathered": sum(self._kept.values()) + more.get("gathered", 0.0),
            "workspace": more.get("workspace", 0.0),
        }
        if (total := sum(parts.values())) > self._total:
            self._total, self.most = total, parts


def _passing(layer: StageLayer) -> float:
    """Copies of parameters that are there while the layer computes: its own, and the next layer's on their way."""
    return 2 * layer.weights.gathered if layer.always else 0.0
