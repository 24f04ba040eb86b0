"""One step of training, wherever steps are run: by the trainer, in measurements, in comparisons with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from vitpar.parallel import ParallelModel
from vitpar.training.optim.gradient_norm import clip_, shard_norms, total_norm
from vitpar.training.optim.optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from vitpar.training.faults.non_finite import NonFinite
    from vitpar.training.optim.ema import EMA
    from vitpar.training.optim.loss_scale import LossScaler


class Stepped(NamedTuple):
    """loss: this rank's part of it. norm: of the gradients before clipping, equal on all ranks. Both 0-dim, on the
    device. told: what the metrics say of a step that may be skipped."""

    loss: Tensor
    norm: Tensor
    told: dict[str, Any]


def nothing(*_: object) -> None:
    """What is to be done where nothing is."""


class TrainStep:
    """Gradients, their norm, clipping, the update of parameters and of their average. Collective.

    Nothing waits for the device, unless `non_finite` does.

    clip_grad_norm: the largest norm of the gradients, 0 for any. scaler: of the loss, in fp16. non_finite: decides
    whether a step is skipped (None: none is). after_gradients: told the step's number when they are there;
    before_update: called before parameters change.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: ShardedOptimizer,
        *,
        clip_grad_norm: float = 0.0,
        scaler: LossScaler | None = None,
        ema: EMA | None = None,
        non_finite: NonFinite | None = None,
        after_gradients: Callable[[int], None] = nothing,
        before_update: Callable[[], None] = nothing,
    ) -> None:
        self.model, self.optimizer, self.ema = model, optimizer, ema
        self._limit, self._scaler, self._non_finite = clip_grad_norm, scaler, non_finite
        self._after_gradients, self._before_update = after_gradients, before_update

    def __call__(
        self, number: int, lr: float, images: Tensor | None, labels: Tensor, keys: Tensor | None = None
    ) -> Stepped:
        """Step `number`, from 1, with learning rate `lr`. images, labels, keys: see ``ParallelModel.forward_backward``.

        Where loss or gradients are not finite on any rank, all skip the update, if `non_finite` says so.
        """
        model, phase = self.model, self.model.phase
        scale = self._scaler.scale if self._scaler else 1.0
        model.loss_scale = scale
        loss = model.forward_backward(images, labels, keys)
        self._after_gradients(number)
        with phase("norm and clipping"):
            gradients = self.optimizer.gradients()
            parts = shard_norms(gradients, model)
            waits = self._non_finite is not None and self._non_finite.waits
            norm = total_norm(parts, model, loss if waits else None)
            norm = norm / scale if self._scaler else norm
            told = self._non_finite.look(number, loss, parts, norm) if self._non_finite else {}
            self._before_update()
            if not told.get("skipped") and (self._limit or self._scaler):
                clip_(gradients, norm, self._limit, scale)
        with phase("update"):
            if told.get("skipped"):
                self.optimizer.skip()
            else:
                self.optimizer.step(lr)
                if self.ema:
                    self.ema.update(number)
        return Stepped(loss, norm, told)
