"""The rows of metrics.jsonl: collected without waiting for the device, completed once per log interval."""

from __future__ import annotations

import math
import resource
import sys
import time
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.io import parse_toml
from vitpar.launch.world_group import all_reduce_
from vitpar.models.config import ViTConfig
from vitpar.parallel import ParallelModel
from vitpar.parallel.precision import PRECISIONS

if TYPE_CHECKING:
    from vitpar.data import Batch
    from vitpar.training.recipe import Recipe
    from vitpar.training.step import Stepped

WARM_UP_STEPS = 1
"""Steps left out of the mean rate: the first allocates, connects and compiles."""


class _Step(NamedTuple):
    """A step that was queued on the device; loss and norm are tensors still to be read."""

    number: int
    epoch: float
    samples: int
    loss: Tensor
    norm: Tensor
    lr: float
    data_seconds: float
    told: dict[str, Any]


class Worst(NamedTuple):
    """Numbers that only this rank knows, or the largest of all ranks.

    stop: 1 where a signal has asked for the end. step_seconds: of a step. minutes: since the last checkpoint.
    writing: how far the checkpoint that is being written is (``vitpar.training.saving.saver``).
    """

    stop: float
    step_seconds: float
    minutes: float
    writing: float


class StepLog:
    """Rows of ``{"kind": "train", ...}``, one a step.

    done: steps that another process did. The clock runs from `resume_clock` and stands still from `flush` until the
    next `resume_clock` or `add`, so evaluation and saving are not counted. Times of a step are means over its log
    interval.
    """

    def __init__(self, recipe: Recipe, config: ViTConfig, model: ParallelModel, done: int = 0) -> None:
        self._warm_from = done + WARM_UP_STEPS
        self._recipe, self._config, self._model = recipe, config, model
        self._pending: list[_Step] = []
        self._begun = self._waiting = time.perf_counter()
        self._data_seconds = 0.0
        self._step_done: torch.cuda.Event | None = None
        self._steps = 0
        self._seconds = 0.0

    def resume_clock(self) -> None:
        """Start the interval here; what happened since the last flush was no training."""
        self._begun = self._waiting = time.perf_counter()

    def data_ready(self) -> None:
        """The batch of the coming step has arrived: the time since the last step was spent waiting for it, unless the
        GPU had that step to do all the while."""
        busy = self._step_done is not None and not self._step_done.query()
        self._data_seconds = 0.0 if busy else time.perf_counter() - self._waiting

    def add(self, number: int, batch: Batch, lr: float, stepped: Stepped) -> None:
        """Update `number` is done, or on its way on the device."""
        self._pending.append(
            _Step(number, batch.epoch, batch.samples, *stepped[:2], lr, self._data_seconds, stepped.told)
        )
        if self._model.device.type == "cuda":
            self._step_done = torch.cuda.Event()
            self._step_done.record()
        self._waiting = time.perf_counter()

    def flush(self, mine: Worst) -> tuple[list[dict[str, Any]], Worst]:
        """The rows since the last flush, with the losses of the global batches; and the worst of all ranks' `mine`, in
        the same message. Collective, after one step at least.

        Of a skipped step, a loss or norm that is not finite is None.
        """
        losses = torch.stack([step.loss for step in self._pending]).double()
        all_reduce_(losses)
        waits = torch.tensor([*mine, *(step.data_seconds for step in self._pending)], device=losses.device)
        all_reduce_(waits, dist.ReduceOp.MAX)  # who waits longest is waited for
        norms = torch.stack([step.norm for step in self._pending]).tolist()
        worst, waited = Worst(*waits[: len(mine)].tolist()), waits[len(mine) :].tolist()
        totals = losses.tolist()  # waits for the device, so the clock below is honest
        now = time.perf_counter()
        seconds = (now - self._begun) / len(self._pending)
        counted = sum(step.number > self._warm_from for step in self._pending)
        self._steps += counted
        self._seconds += seconds * counted
        self._begun = self._waiting = now
        rows = [
            {
                "kind": "train",
                "step": step.number,
                "epoch": round(step.epoch, 6),
                "samples": step.samples,
                "loss": _shown(loss, step),
                "lr": step.lr,
                "grad_norm": _shown(norm, step),
                "step_ms": round(seconds * 1e3, 3),
                "data_ms": round(wait * 1e3, 3),
                "images_per_second": round(self._recipe.train.batch_size / seconds, 2),
                "mfu": self._mfu(seconds),
                "memory_bytes": memory_bytes(self._model.device),
                **step.told,
            }
            for step, loss, norm, wait in zip(self._pending, totals, norms, waited, strict=True)
        ]
        self._pending.clear()
        return rows, worst

    @property
    def mean_rate(self) -> float | None:
        """Global images a second over all steps after warm-up, None where there were none."""
        return self._recipe.train.batch_size * self._steps / self._seconds if self._seconds else None

    def _mfu(self, seconds: float) -> float | None:
        """Model FLOPs over what the devices could do at their peak, None where the peak is not known."""
        peak = peak_flops(self._model.device, self._recipe.train.precision)
        if peak is None:
            return None
        return round(self._config.flops * self._recipe.train.batch_size / seconds / (peak * dist.get_world_size()), 4)


def _shown(number: float, step: _Step) -> float | None:
    return None if step.told.get("skipped") and not math.isfinite(number) else number


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense FLOP/s of `device` in the type that `precision` computes in (bf16 for fp8, so that the two compare); None
    where no shipped cluster file names the device."""
    if device.type != "cuda":
        return None
    dtype = str(PRECISIONS[precision].compute).removeprefix("torch.")
    return _data_sheets().get(torch.cuda.get_device_name(device), {}).get(dtype)


@cache
def _data_sheets() -> dict[str, dict[str, float]]:
    """Dense FLOP/s by device name and dtype, of the clusters that vitpar ships."""
    sheets = (parse_toml(file.read_text(encoding="utf-8")) for file in (files("vitpar") / "clusters").iterdir())
    return {sheet["device_name"]: sheet["matmul"] for sheet in sheets}


def memory_bytes(device: torch.device) -> int:
    """Peak memory of this rank so far: allocated on its GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
