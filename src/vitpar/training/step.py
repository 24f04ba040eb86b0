"""One training step, as used by the trainer, in measurements and in comparisons."""

import gc
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple, Self

from torch import Tensor

from vitpar.parallel import ParallelModel
from vitpar.tasks.task import StepInput
from vitpar.tasks.teacher import Teacher
from vitpar.training.faults.non_finite import NonFinite
from vitpar.training.optim.average import EMA
from vitpar.training.optim.loss_scale import LossScaler
from vitpar.training.optim.norms import clip_, clip_factor, shard_norms, total_norms
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.signals import LayerSignals

COLLECT_EVERY_S = 5.0
"""Approximate seconds between two collections."""


class Stepped(NamedTuple):
    """Result of a step. Tensors are 0-dim, on the device."""

    loss: Tensor
    """This rank's part of the loss."""
    norm: Tensor
    """Norm of the gradients before clipping, equal on all ranks."""
    extra: dict[str, Any]
    """Further metrics of the step, such as whether it was skipped."""
    measured: Tensor | None = None
    """This rank's part of the sums that the loss measured (``ParallelModel.measured``)."""
    signals: Tensor | None = None
    """This rank's part of ``LayerSignals.sums``; None at steps without signals."""


def nothing(*_: object) -> None:
    """No-op callback."""


class TrainStep:
    """Training step: gradients, their norm, clipping, the update of parameters and of their average. Collective.

    The host does not wait for the device, unless `non_finite` does.

    clip_grad_norm: largest norm of the gradients, 0 for no clipping.
    clip_by_part: whether it is that of each part of the model (``ModelConfig.clip_part``).
    scaler, teacher, signals: scale of the loss in fp16, logits for targets, signals of groups of layers; None for none.
    non_finite: decides whether a step is skipped; None skips none.
    after_gradients, before_update: called with the step's number after backward, and before parameters change.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: ShardedOptimizer,
        *,
        clip_grad_norm: float = 0.0,
        clip_by_part: bool = False,
        scaler: LossScaler | None = None,
        ema: EMA | None = None,
        non_finite: NonFinite | None = None,
        teacher: Teacher | None = None,
        signals: LayerSignals | None = None,
        after_gradients: Callable[[int], None] = nothing,
        before_update: Callable[[], None] = nothing,
    ) -> None:
        self.model, self.optimizer, self.ema = model, optimizer, ema
        self._limit, self._scaler, self._non_finite = clip_grad_norm, scaler, non_finite
        self._after_gradients, self._before_update = after_gradients, before_update
        self._teacher, self._signals = teacher, signals
        self._part = model.config.clip_part if clip_by_part else lambda name: ""
        named = (f"{layer}.{name}" for layer, one in model.config.layers.items() for name in one.parameters)
        self._parts = sorted({self._part(name) for name in named})  # equal on all ranks

    def __call__(
        self,
        number: int,
        lr: float,
        images: Tensor | None,
        targets: Tensor,
        keys: Tensor | None = None,
        sides: Mapping[str, Tensor] = {},
        taught: Tensor | None = None,
    ) -> Stepped:
        """Run step `number`, counted from 1, with learning rate `lr`, on a `StepInput`.

        If loss or gradients are not finite on any rank, all skip the update, if `non_finite` says so.
        """
        model, phase = self.model, self.model.phase
        scale = self._scaler.scale if self._scaler else 1.0
        if self._teacher is not None:
            with phase("teacher"):
                targets = self._teacher.targets(StepInput(images, targets, keys, sides, taught))
        model.loss_scale, model.keep_low_precision_gradients = scale, self._clips_in_one_pass
        loss = model.forward_backward(images, targets, keys, **sides)
        self._after_gradients(number)
        with phase("norm and clipping"):
            gradients = self.optimizer.gradients()
            split = [gradients]  # of each part whose norm is clipped
            if len(self._parts) > 1:
                split = [{name: g for name, g in gradients.items() if self._part(name) == one} for one in self._parts]
            each = [shard_norms(part, model) for part in split]
            parts = list(chain.from_iterable(each))
            waits = self._non_finite is not None and self._non_finite.waits
            norms = total_norms(each, model, loss if waits else None)
            norms = norms / scale if self._scaler else norms
            norm = norms.square().sum().sqrt() if len(norms) > 1 else norms[0]
            extra = self._non_finite.look(number, loss, parts, norm) if self._non_finite else {}
            self._before_update()
            signals = self._signals if self._signals and self._signals.wanted(number) else None
            before = signals.sample() if signals else None
            if not extra.get("skipped") and not self._clips_in_one_pass:
                for part, of_part in zip(split, norms, strict=True):
                    clip_(part, of_part, self._limit, scale)
        with phase("update"):
            if extra.get("skipped"):
                self.optimizer.skip()
            elif self.optimizer.one_pass:
                factor = clip_factor(norm, self._limit, scale) if self._clips_in_one_pass else None
                average = (self.ema.average, self.ema.decay(number)) if self.ema else None
                self.optimizer.step_in_one_pass(lr, factor, model.low_precision_params, average)
            else:
                self.optimizer.step(lr)
                if self.ema:
                    self.ema.update(number)
        sums = signals.sums(parts, scale, before) if signals and before is not None else None
        return Stepped(loss, norm, extra, model.measured, sums)

    @property
    def _clips_in_one_pass(self) -> bool:
        """Whether the update multiplies the gradients, which it does by one factor."""
        return self.optimizer.one_pass and len(self._parts) == 1


class Garbage:
    """Context manager that keeps Python's garbage collector from running in the middle of a step.

    By default each rank collects when it has made enough objects: at another step than the others, which wait for it.
    Inside the ``with``, collections run only at steps that all ranks share, and skip objects that existed before.
    """

    def __init__(self) -> None:
        self._next = 0
        self._was_on = gc.isenabled()

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        if self._was_on:
            gc.enable()

    def maybe_collect(self, number: int, seconds: float) -> None:
        """Collect after step `number`, if it is time. seconds: duration of a step, equal on all ranks."""
        # The first steps make most of the objects that are never freed.
        if number >= self._next:
            gc.collect()
            self._next = number + (max(1, int(COLLECT_EVERY_S / seconds)) if seconds else 1)
