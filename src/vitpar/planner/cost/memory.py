"""How much memory a rank needs at most: what is alive at every action of a step, in the order of the schedule.

The order of a rank's actions does not depend on how long they take, so neither does its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitpar.planner.cost.pipeline import ActionPart
from vitpar.planner.cost.stage import StageCost, StageLayer

PARTS = ("parameters", "optimizer", "gradients", "gathered", "activations", "workspace", "buffers", "reserved")
"""Parts of `Memory.total`."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at its fullest moment, by what they hold.

    parameters, optimizer: kept for the whole run. gradients: reduced, or waiting to be. gathered: copies of parameters
    to compute with. activations: kept for backward. workspace: what one layer takes while it computes, and what sending
    does. buffers: what comes from other stages, and the step's images. reserved: what programs take besides. host: in
    the host's memory (+offload), not in `total`.
    """

    parameters: float
    optimizer: float
    gradients: float
    gathered: float
    activations: float
    workspace: float
    buffers: float
    reserved: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """All of it but what the host keeps."""
        return sum(getattr(self, part) for part in PARTS)


@dataclass
class Held:
    """Bytes that one rank keeps for its stages throughout a step."""

    stages: Mapping[int, StageCost]
    """Pipeline stages of the rank, by number."""
    moments: float
    """Bytes that the optimizer keeps for every byte of parameters."""
    buffers: float
    """Bytes of communication buffers."""
    microbatches: int
    reserved: float = 0.0
    """Bytes of a device that no plan can use."""

    def at_most(self, actions: Sequence[Sequence[ActionPart]]) -> Memory:
        """The memory of a rank that does `actions` in order."""
        layers = [layer for stage in self.stages.values() for layer in stage.layers]
        held = sum(layer.weights.local_bytes for layer in layers if not layer.weights.offloaded)
        host = sum(layer.weights.local_bytes for layer in layers if layer.weights.offloaded)
        walk = _Walk(self.stages, self.microbatches)
        for action in actions:
            for kind, number, _ in action:
                walk.do(kind, number)
        walk.done()
        return Memory(
            parameters=held,
            optimizer=held * self.moments,
            gradients=walk.most["gradients"],
            gathered=walk.most["gathered"],
            activations=walk.most["activations"],
            workspace=walk.most["workspace"],
            buffers=self.buffers,
            reserved=self.reserved,
            host=host * (2 + self.moments),
        )


class _Walk:
    """Goes through a step's actions and remembers the fullest moment."""

    def __init__(self, stages: Mapping[int, StageCost], microbatches: int) -> None:
        self._stages, self._microbatches = stages, microbatches
        self._saved = {number: sum(layer.work.saved for layer in stage.layers) for number, stage in stages.items()}
        self._backwards = dict.fromkeys(stages, 0)
        self._whole: dict[tuple[int, int], float] = {}  # gradients by stage and layer
        self._kept = dict.fromkeys(stages, 0.0)  # copies of parameters, from the first use in the step to the last
        self._alive = self._gradients = self._gathered = 0.0  # bytes now
        self.most: dict[str, float] = {}
        self._total = -1.0
        self._done: dict[tuple[str, int, float, float], float] = {}

    def do(self, kind: str, number: int) -> None:
        """One action for stage `number`."""
        if self._is_like_before(kind, number):
            return
        stage = self._stages[number]
        if kind == "F":
            self._keep(
                number,
                sum(layer.weights.gathered for layer in stage.layers if not layer.execution.reshard_after_forward),
            )
            before = 0.0
            for layer in stage.layers:
                self._moment(before, layer.weights.gathering, _passing(layer))
                before += layer.work.saved
                self._moment(before, layer.work.workspace, _passing(layer))
            self._alive += self._saved[number]
        elif kind in ("B", "W"):
            self._backward(number, stage)
        else:  # the gradients of inputs: activations stay for those of weights
            space = max(layer.work.workspace for layer in stage.layers)
            self._moment(0.0, space, max(_passing(layer) for layer in stage.layers))

    def _is_like_before(self, kind: str, number: int) -> bool:
        """Do an action that needs no more than an earlier one did, as most of a step's actions: all it changes is how
        many activations are alive. Return whether it is one."""
        backward = kind in ("B", "W")
        if backward and (not self._backwards[number] or self._backwards[number] + 1 == self._microbatches):
            return False  # the first makes gradients, the last reduces them
        key = kind, number, self._gradients, self._gathered
        if self._done.get(key, -1.0) < self._alive:
            self._done[key] = self._alive
            return False
        if kind == "F":
            self._alive += self._saved[number]
        elif backward:
            self._backwards[number] += 1
            self._alive -= self._saved[number]
        return True

    def done(self) -> None:
        """The optimizer's step."""
        self._moment()

    def _backward(self, number: int, stage: StageCost) -> None:
        self._backwards[number] += 1
        last = self._backwards[number] == self._microbatches
        left = self._saved[number]
        self._alive -= left
        for place, layer in reversed(list(enumerate(stage.layers))):
            here, weights, passing = (number, place), layer.weights, _passing(layer)
            fresh = (
                0.0
                if here in self._whole
                else (weights.unreduced_grad_bytes if layer.execution.wrapped else weights.local_bytes)
            )
            self._moment(left, layer.work.workspace, passing, fresh)
            if layer.execution.gathers_in_backward:
                self._moment(left, layer.weights.gathering, passing)
            left -= layer.work.saved
            reduced = layer.execution.reduced
            if layer.execution.wrapped and (reduced == "every micro-batch" or (last and reduced == "last micro-batch")):
                self._moment(left, weights.reducing, gradients=fresh + weights.unreduced_grad_bytes)
                self._hold(here, 0.0 if layer.weights.offloaded else weights.local_bytes)
            elif not layer.execution.wrapped:
                sent = last and weights.reduce
                self._moment(
                    left, weights.reducing * bool(sent), gradients=fresh + (weights.local_bytes if sent else 0.0)
                )
                self._hold(here, weights.local_bytes)
            else:
                self._hold(here, weights.unreduced_grad_bytes)
        if last:
            for place, layer in reversed(list(enumerate(stage.layers))):
                if layer.execution.wrapped and layer.execution.reduced == "end of step":
                    self._moment(workspace=layer.weights.reducing, gradients=layer.weights.unreduced_grad_bytes)
                    self._hold((number, place), 0.0 if layer.weights.offloaded else layer.weights.local_bytes)
        if last:
            self._keep(number, 0.0)

    def _hold(self, here: tuple[int, int], gradients: float) -> None:
        self._gradients += gradients - self._whole.get(here, 0.0)
        self._whole[here] = gradients

    def _keep(self, number: int, copies: float) -> None:
        self._gathered += copies - self._kept[number]
        self._kept[number] = copies

    def _moment(
        self, activations: float = 0.0, workspace: float = 0.0, gathered: float = 0.0, gradients: float = 0.0
    ) -> None:
        """Record a possible peak: current bytes plus these transient bytes."""
        now = self._alive + self._gradients + self._gathered
        total = now + activations + workspace + gathered + gradients
        if total > self._total:
            self._total = total
            self.most = {
                "activations": self._alive + activations,
                "gradients": self._gradients + gradients,
                "gathered": self._gathered + gathered,
                "workspace": workspace,
            }


def _passing(layer: StageLayer) -> float:
    """Copies of parameters that are there while the layer computes: its own, and the next layer's on their way."""
    return 2 * layer.weights.gathered if layer.execution.reshard_after_forward else 0.0
