"""Rows of metrics.jsonl: collected without waiting for the device, completed once per log interval, and watched."""

import math
import resource
import sys
import time
import zlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from vitpar.data.loader import Batch
from vitpar.io import parse_toml
from vitpar.launch.world_group import all_reduce_
from vitpar.models.config import ModelConfig
from vitpar.models.derived import with_frozen
from vitpar.parallel import ParallelModel
from vitpar.parallel.precision import PRECISIONS
from vitpar.recipe import Recipe
from vitpar.tasks import Metric
from vitpar.text import count, either
from vitpar.training.signals import LayerSignals
from vitpar.training.step import Stepped

WARM_UP_STEPS = 1
"""Steps excluded from the mean rate: the first allocates, connects and compiles."""
WATCHED_STEPS = 20
"""Steps to measure before a warning, without the first, which fills the queue."""
WAITING_SHARE = 0.15
"""Fraction of the time spent waiting for images from which the user is warned."""
GROWN = 1.01
"""Growth of a rank's peak memory after which a row has the peaks of all ranks."""


class _Step(NamedTuple):
    """Step that was queued on the device."""

    number: int
    """Number of the step, from 1."""
    epoch: float
    """Epochs seen after it."""
    samples: int
    """Samples seen after it."""
    samples_crc32: int | None
    """CRC-32 of the keys of its samples; None in a stream, where a rank knows only those that it reads."""
    lr: float
    """Learning rate."""
    data_seconds: float
    """Seconds that this rank waited for the batch."""
    done: Stepped
    """Its result, not read from the device yet."""


class Worst(NamedTuple):
    """State of one rank, or the largest values over all ranks."""

    stop: float
    """1 if a signal has asked the run to end, else 0."""
    step_seconds: float
    """Duration of a step."""
    minutes: float
    """Minutes since the last checkpoint."""
    eval_minutes: float
    """Minutes since the last evaluation."""
    writing: float
    """Progress of the checkpoint that is being written (``vitpar.checkpoint.writer``)."""


class StepLog:
    """Collector of rows ``{"kind": "train", ...}``, one per step.

    The clock runs from `resume_clock`. It stops from `flush` until the next `resume_clock` or `add`, so evaluation and
    saving are not counted. Times of a step are means over its log interval.

    metrics: metrics that the loss measures (``Task.TRAINING_METRICS``).
    signals: those of groups of layers.
    done: steps that an earlier process made.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: ModelConfig,
        model: ParallelModel,
        metrics: Sequence[Metric],
        signals: LayerSignals,
        done: int = 0,
    ) -> None:
        self._warm_from = done + WARM_UP_STEPS
        self._recipe, self._config, self._model = recipe, config, model
        self._metrics, self._signals = metrics, signals
        self._memory: list[int] = []
        self._flops_of: dict[int, int] = {}
        self._pending: list[_Step] = []
        self._begun = self._waiting = time.perf_counter()
        self._data_seconds = 0.0
        self._step_done: torch.cuda.Event | None = None
        self._steps = 0
        self._seconds = 0.0
        self.pace = 0.0
        """Seconds of a step in the newest interval; 0 before the first."""

    def resume_clock(self) -> None:
        """Start the interval now, without the time since the last flush, which was no training."""
        self._begun = self._waiting = time.perf_counter()

    def data_ready(self) -> None:
        """Record that the batch of the coming step has arrived.

        The time since the last step was spent waiting for it, unless the GPU was busy with that step all the time.
        """
        busy = self._step_done is not None and not self._step_done.query()
        self._data_seconds = 0.0 if busy else time.perf_counter() - self._waiting

    def add(self, number: int, batch: Batch, lr: float, stepped: Stepped) -> None:
        """Record that update `number` is done, or queued on the device."""
        crc = zlib.crc32(batch.keys.numpy().tobytes()) if getattr(batch, "whole", True) else None  # text is whole
        self._pending.append(_Step(number, batch.epoch, batch.samples, crc, lr, self._data_seconds, stepped))
        if self._model.device.type == "cuda":
            self._step_done = torch.cuda.Event()
            self._step_done.record()
        self._waiting = time.perf_counter()

    def flush(self, mine: Worst) -> tuple[list[dict[str, Any]], Worst]:
        """Return the rows since the last flush, and the largest values of all ranks. Collective.

        Requires at least one step. Losses are those of global batches. A loss or norm of a skipped step that is not
        finite is None.

        mine: state of this rank. It is reduced in the same message as the waiting times.
        """
        steps, signals, memory, gpus = self._summed()  # waits for the device
        waits = torch.tensor([*mine, *(step.data_seconds for step in self._pending)], device=self._model.device)
        all_reduce_(waits, dist.ReduceOp.MAX)  # the rank that waits longest delays all others
        norms = torch.stack([step.done.norm for step in self._pending]).tolist()
        worst, waited = Worst(*waits[: len(mine)].tolist()), waits[len(mine) :].tolist()
        now = time.perf_counter()
        seconds = (now - self._begun) / len(self._pending)
        counted = sum(step.number > self._warm_from for step in self._pending)
        self._steps += counted
        self._seconds += seconds * counted
        self._begun = self._waiting = now
        self.pace, mfu = round(seconds * 1e3, 3) / 1e3, self._mfu(seconds)
        rows = [
            {
                "kind": "train",
                "step": step.number,
                "epoch": round(step.epoch, 6),
                "samples": step.samples,
                "samples_crc32": step.samples_crc32,
                "loss": _shown(loss, step),
                "lr": step.lr,
                "grad_norm": _shown(norm, step),
                "step_ms": round(seconds * 1e3, 3),
                "data_ms": round(wait * 1e3, 3),
                "images_per_second": round(self._recipe.train.batch_size / seconds, 2),
                "mfu": mfu,
                "memory_bytes": memory_bytes(self._model.device),
                **self._means(counted, sums),
                **gpus,
                **step.done.extra,
            }
            for step, (loss, counted, *sums), norm, wait in zip(self._pending, steps, norms, waited, strict=True)
        ]
        logged = [row for row, step in zip(rows, self._pending, strict=True) if step.done.signals is not None]
        for row, part in zip(logged, signals, strict=True):
            row |= self._signals.row(part)
        if not self._memory or any(now > GROWN * before for now, before in zip(memory, self._memory, strict=True)):
            rows[-1]["memory_by_rank"] = self._memory = memory
        self._pending.clear()
        return rows, worst

    def _summed(self) -> tuple[list[list[float]], list[list[list[float]]], list[int], dict[str, float]]:
        """Add up what all ranks know of the pending steps, in one message. Collective; waits for the device.

        Returns loss, number of counted samples and sums of metrics of every step; sums of the steps that have signals;
        the peak memory of each rank; and what rows say about GPUs.
        """
        losses = torch.stack([step.done.loss for step in self._pending]).double()
        unknown = losses.new_zeros(1 + len(self._metrics))
        sums = [unknown if step.done.measured is None else step.done.measured for step in self._pending]
        steps = torch.cat([losses[:, None], torch.stack(sums)], dim=1)
        signals = [step.done.signals for step in self._pending if step.done.signals is not None]
        ranks = torch.zeros(dist.get_world_size() + 3, dtype=torch.float64)
        ranks[dist.get_rank()] = memory_bytes(self._model.device)
        if load := device_load(self._model.device):
            ranks[-3:] = torch.tensor([1.0, *load])
        parts = [steps, *signals, ranks.to(steps.device)]
        message = torch.cat([part.flatten() for part in parts])
        all_reduce_(message)
        steps, *signals, ranks = message.cpu().split([part.numel() for part in parts])
        *memory, known, used, watts = ranks.tolist()
        gpus = {"gpu_utilization": round(used / known, 4), "gpu_watts": round(watts, 1)} if known else {}
        by_step = steps.view(len(self._pending), -1).tolist()
        return by_step, [part.view(3, -1).tolist() for part in signals], list(map(int, memory)), gpus

    def _means(self, samples: float, sums: Sequence[float]) -> dict[str, float]:
        """Return the metrics of a step; none if no sample counts, as where all images are mixed."""
        named = zip(self._metrics, sums, strict=True)
        return {metric.name: round(total / samples, 6) for metric, total in named} if samples else {}

    @property
    def mean_rate(self) -> float | None:
        """Global images per second over all steps after warm-up; None if there were none."""
        return self._recipe.train.batch_size * self._steps / self._seconds if self._seconds else None

    def _mfu(self, seconds: float) -> float | None:
        """Return model FLOPs relative to the peak of the devices; None if the peak is unknown."""
        peak = peak_flops(self._model.device, self._recipe.train.precision)
        if peak is None:
            return None
        flops = sum(map(self._flops, self._pending)) / len(self._pending)
        return round(flops * self._recipe.train.batch_size / seconds / (peak * dist.get_world_size()), 4)

    def _flops(self, step: _Step) -> int:
        """Return the FLOPs of training on one sample in a step."""
        size = int(step.done.extra.get("image_size", self._config.image_size))
        if size not in self._flops_of:
            sized = self._config if size == self._config.image_size else self._config.resized(size)
            assert sized is not None, "the run has trained on this size"
            self._flops_of[size] = with_frozen(sized, self._model.execution.frozen).flops
        return self._flops_of[size]


def _shown(number: float, step: _Step) -> float | None:
    return None if step.done.extra.get("skipped") and not math.isfinite(number) else number


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the dense FLOP/s of `device` in the compute dtype of `precision`; None if they are unknown.

    They come from the shipped cluster files. For fp8 it is the rate of bf16, so that the two compare.
    """
    if device.type != "cuda":
        return None
    dtype = str(PRECISIONS[precision].compute).removeprefix("torch.")
    return _data_sheets().get(torch.cuda.get_device_name(device), {}).get(dtype)


@cache
def _data_sheets() -> dict[str, dict[str, float]]:
    """Return dense FLOP/s by device name and dtype, from the clusters that vitpar ships."""
    sheets = (parse_toml(file.read_text(encoding="utf-8")) for file in (files("vitpar") / "clusters").iterdir())
    return {sheet["device_name"]: sheet["matmul"] for sheet in sheets}


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank so far, in bytes: allocated on its GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def device_load(device: torch.device) -> tuple[float, float] | None:
    """Return the share of the last second or less in which a kernel ran on `device`, and its power in watts.

    As nvidia-smi shows them. None for a CPU, and where NVML does not report them. Takes about a millisecond.
    """
    if device.type != "cuda" or not _answers(device):
        return None
    return torch.cuda.utilization(device) / 100, torch.cuda.power_draw(device) / 1000


@cache
def _answers(device: torch.device) -> bool:
    """Return whether NVML reports the load of `device`. It needs its package, and rights that containers may lack."""
    try:
        torch.cuda.utilization(device)
        torch.cuda.power_draw(device)
    except Exception:  # NVML's errors are classes of a package that may be missing
        return False
    return True


class InputWatch:
    """Detector of runs that wait for their images.

    workers: decoding threads of a rank.
    cores: cores of a rank; a part of one if ranks share it.
    first: number of the first step.
    small: whether the images are so small that several threads decode no more of them than one.
    """

    def __init__(self, recipe: Recipe, workers: int, cores: float, first: int = 1, *, small: bool = False) -> None:
        self._recipe, self._workers, self._cores, self._first = recipe, workers, cores, first
        self._small = small
        self._steps, self._waited, self._taken, self._said = 0, 0.0, 0.0, False

    def look(self, rows: Sequence[dict[str, Any]]) -> str | None:
        """Return a warning for the user, once in a run; else None.

        While a step waits for images, all threads decode. The images of a step then take its whole duration, so this
        many threads over the part of the time without waiting would keep up.

        rows: new rows of metrics.jsonl.
        """
        for row in rows:
            if row["step"] > self._first:
                self._steps, self._waited = self._steps + 1, self._waited + row["data_ms"]
                self._taken += row["step_ms"]
        if self._said or self._steps < WATCHED_STEPS or self._waited < WAITING_SHARE * self._taken:
            return None
        self._said = True
        waiting = self._waited / self._taken
        share = f"training waits for images {waiting:.0%} of the time"
        if self._small and self._recipe.data.cache != "device":
            return f"{share}: {either(_remedies(self._recipe, small=True, threads=self._workers))}"
        # With 0, the main thread decodes while the step waits.
        needed = math.ceil(self._workers / (1 - waiting)) if 0 < waiting < 1 and self._workers else None
        enough = f" (about {needed:,} decoding threads a rank would keep up)" if needed else ""
        if self._workers < self._cores:
            return (
                f"{share}{enough}: raise data.workers (it is {self._workers}, and a rank has {self._cores:.3g} cores "
                "here)"
            )
        threads = count(self._workers, "decoding thread")
        return f"{share}, with {threads} on {self._cores:.3g} cores a rank{enough}: {either(_remedies(self._recipe))}"


def _remedies(recipe: Recipe, *, small: bool = False, threads: int = 0) -> list[str]:
    """Return what makes input cheaper and is not done yet. small: whether threads decode no more than one does."""
    cache = recipe.data.cache
    decoded = recipe.data.path is not None and cache != "device"  # during the training
    augment = recipe.augment
    augments = augment.policy or np.any(augment.color_jitter) or augment.random_erasing
    ways = {
        "leave out data.workers, since one thread decodes small images fastest": small and threads > 1,
        "pack smaller images (`vitpar data pack --short-side`)": decoded and not small,
        "set data.cache to memory, or to device if all have one size": decoded and cache == "none",
        "set data.cache to device if all images have one size": small and cache == "memory",
        "augment less": augments,
        "use more cores": not small,
    }
    return [way for way, possible in ways.items() if possible]
