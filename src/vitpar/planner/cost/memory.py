"""Peak memory of a rank: replay the actions of a step in the schedule's order and record what is alive at each.

The order of a rank's actions does not depend on their durations, so memory needs no times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from vitpar.planner.cost.stage import StageCost, StageLayer
from vitpar.strategy.pipeline_orders import ActionPart

PARTS = (
    "parameters",
    "optimizer",
    "gradients",
    "gathered",
    "activations",
    "workspace",
    "buffers",
    "teacher",
    "reserved",
)
"""Parts of `Memory.total`."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the moment of its peak, by content."""

    parameters: float
    """Stored parameters, kept for the complete run."""
    optimizer: float
    """Optimizer state, kept for the complete run."""
    gradients: float
    """Gradients, reduced or not, and their copies in a reduction."""
    gathered: float
    """Gathered or 16-bit copies of parameters."""
    activations: float
    """Activations saved for backward."""
    workspace: float
    """Transient tensors of the layer that computes."""
    buffers: float = 0.0
    """Receive buffers of a pipeline stage, and the step's images."""
    reserved: float = 0.0
    """Device memory that no plan can use: that of the CUDA context, and images that the device holds."""
    teacher: float = 0.0
    """Parameters of the teacher of a distillation."""
    host: float = 0.0
    """Host memory for +offload; not in `total`."""

    @property
    def total(self) -> float:
        """Return the bytes of device memory: all `PARTS`."""
        return sum(getattr(self, part) for part in PARTS)


def peak_memory(
    stages: Mapping[int, StageCost], actions: Sequence[Sequence[ActionPart]], microbatches: int, moments: float
) -> Memory:
    """Return a rank's memory at its peak during `actions`, run in order, and the optimizer step after them.

    Buffers, reserved bytes and a teacher, which a rank keeps throughout a step, are left out.

    stages: pipeline stages of the rank, by number.
    microbatches: micro-batches in `actions`.
    moments: bytes of optimizer state per byte of parameters.
    """
    walk = _Walk(stages, microbatches)
    for computation, number, _ in chain.from_iterable(actions):
        walk.do(computation, number)
    walk.moment()  # the optimizer's step, which holds gradients and no activations
    weights = [layer.weights for stage in stages.values() for layer in stage.layers]
    device, host = ([one for one in weights if one.offloaded == on_host] for on_host in (False, True))
    trained = sum(one.gradient_bytes for one in host)
    return Memory(
        parameters=sum(one.local_bytes for one in device),
        optimizer=sum(one.gradient_bytes for one in device) * moments,
        **walk.most,
        host=sum(one.local_bytes for one in host) + trained * (1 + moments),  # then gradients and optimizer state
    )


class _Walk:
    """Replay of a rank's actions that remembers the peak."""

    def __init__(self, stages: Mapping[int, StageCost], microbatches: int) -> None:
        self._stages, self._microbatches = stages, microbatches
        self._saved = {number: sum(layer.work.saved for layer in stage.layers) for number, stage in stages.items()}
        self._backwards = dict.fromkeys(stages, 0)
        self._whole: dict[tuple[int, int], float] = {}  # bytes of gradients, by (stage, place of the layer)
        self._kept = dict.fromkeys(stages, 0.0)  # bytes of gathered copies, from the step's first use to its last
        self._alive = self._gradients = self._gathered = 0.0  # current bytes; _alive: saved activations
        self.most: dict[str, float] = {}
        self._total = -1.0
        # (computation, stage, gradient bytes, gathered bytes) -> most activation bytes under which it was replayed
        self._done: dict[tuple[str, int, float, float], float] = {}

    def do(self, computation: str, number: int) -> None:
        """Replay one action of stage `number`. computation: F, I, W or B, as in `ActionPart`."""
        if self._is_like_before(computation, number):
            return
        stage = self._stages[number]
        if computation == "F":
            self._keep(
                number,
                sum(layer.weights.gathered for layer in stage.layers if not layer.execution.reshard_after_forward),
            )
            before = 0.0  # bytes that this micro-batch has saved so far
            for layer in stage.layers:
                before += layer.work.saved
                # Workspace is measured on top of all that the layer saves.
                self.moment(before, layer.work.workspace, _passing(layer))
            self._alive += self._saved[number]
        elif computation in ("B", "W"):
            self._backward(number, stage)
        else:  # I: activations stay alive for the gradients of weights
            space = max(layer.work.workspace for layer in stage.layers)
            self.moment(0.0, space, max(_passing(layer) for layer in stage.layers))

    def _is_like_before(self, computation: str, number: int) -> bool:
        """Skip an action that cannot raise the peak, and update only the counts. Return whether it was skipped.

        Most of a step's actions repeat an earlier one with equal gradients and copies, and no more activations alive.
        """
        backward = computation in ("B", "W")
        if backward and (not self._backwards[number] or self._backwards[number] + 1 == self._microbatches):
            return False  # the first allocates gradients that stay, the last reduces them
        key = computation, number, self._gradients, self._gathered
        if self._done.get(key, -1.0) < self._alive:
            self._done[key] = self._alive
            return False
        if computation == "F":
            self._alive += self._saved[number]
        elif backward:
            self._backwards[number] += 1
            self._alive -= self._saved[number]
        return True

    def _backward(self, number: int, stage: StageCost) -> None:
        """Replay a backward of stage `number`: each layer computes, then its gradients wait or are reduced."""
        self._backwards[number] += 1
        last = self._backwards[number] == self._microbatches
        # `left` counts this micro-batch's activations, which backward frees layer by layer.
        left = self._saved[number]
        self._alive -= left
        for place, layer in reversed(list(enumerate(stage.layers))):
            here, weights, passing = (number, place), layer.weights, _passing(layer)
            if layer.execution.backward == "nothing":
                left -= layer.work.saved
                continue
            # The stage's first backward allocates the layer's gradients. Each does if the one before it reduced them:
            # reduced gradients are kept apart, and the unreduced ones were freed.
            again = layer.execution.wrapped and layer.execution.reduced == "every micro-batch"
            whole = weights.unreduced_grad_bytes if layer.execution.wrapped else weights.gradient_bytes
            fresh = 0.0 if here in self._whole and not again else whole
            self.moment(left, layer.work.workspace, passing, fresh)
            left -= layer.work.saved
            reduced = layer.execution.reduced
            if not weights.trained_elements:
                continue
            if layer.execution.wrapped and (reduced == "every micro-batch" or (last and reduced == "last micro-batch")):
                # FSDP2 copies unreduced gradients into the input of the reduce-scatter: both are alive.
                self.moment(left, gradients=fresh + weights.unreduced_grad_bytes)
                # Offloaded gradients leave the device as soon as they are reduced.
                self._hold(here, 0.0 if weights.offloaded else weights.gradient_bytes)
            elif not layer.execution.wrapped:
                # `GradientSum` copies gradients into one message.
                self.moment(left, gradients=fresh + weights.message * last)
                self._hold(here, weights.gradient_bytes)
            else:
                # Gradients that wait for a later reduction keep their unreduced size.
                self._hold(here, weights.unreduced_grad_bytes)
        if last:
            for place, layer in reversed(list(enumerate(stage.layers))):
                if layer.execution.wrapped and layer.execution.reduced == "end of step":
                    self.moment(gradients=layer.weights.unreduced_grad_bytes)
                    self._hold((number, place), 0.0 if layer.weights.offloaded else layer.weights.gradient_bytes)
            self._keep(number, 0.0)

    def _hold(self, here: tuple[int, int], gradients: float) -> None:
        """Set the gradient bytes of the layer `here` = (stage, place)."""
        self._gradients += gradients - self._whole.get(here, 0.0)
        self._whole[here] = gradients

    def _keep(self, number: int, copies: float) -> None:
        """Set the bytes of parameter copies that stage `number` keeps between actions."""
        self._gathered += copies - self._kept[number]
        self._kept[number] = copies

    def moment(
        self, activations: float = 0.0, workspace: float = 0.0, gathered: float = 0.0, gradients: float = 0.0
    ) -> None:
        """Record a possible peak: current bytes plus these transient bytes.

        The breakdown is that of the peak of the total; the parts have their own peaks at other moments.
        """
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
    """Return the bytes of gathered copies alive while the layer computes, beyond those kept for the complete step.

    A layer that reshards after forward holds its own copy and that of the next layer, prefetched and taken as equally
    large.
    """
    return 2 * layer.weights.gathered if layer.execution.reshard_after_forward else 0.0
