"""Run the steps of a recipe and measure them.

1. Warm-up steps until the time is steady: compilation, connections and allocations are done then.
2. In every repeat, one after the other: steps with the recipe's data, steps with synthetic input, and steps timed phase
   by phase. Every second repeat reverses the order, so that a drift of the machine's speed cancels.
3. The limits of the otherwise idle device (``vitpar.bench.limits``).
4. If asked for, steps under torch's profiler (``vitpar.bench.kernels``).
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitpar.bench.kernels import record
from vitpar.bench.limits import PhaseLimits, measure_limits
from vitpar.data.stream.stream_set import ImageSet
from vitpar.launch.world_group import all_gather_json
from vitpar.models.config import ModelConfig
from vitpar.models.derived import with_frozen
from vitpar.parallel.phases import Phase, PhaseClock, untimed
from vitpar.planner.measure.clock import ClockedRanks
from vitpar.planner.measure.device import device_name
from vitpar.recipe import Recipe
from vitpar.strategy import Plan
from vitpar.tasks import Task
from vitpar.tasks.input import Input
from vitpar.tasks.inputs import input_rate
from vitpar.tasks.task import StepInput
from vitpar.training.build import TRAINING_DATA, TrainingComponents, build
from vitpar.training.metrics import memory_bytes, peak_flops
from vitpar.training.step import Garbage

Report = Callable[[str], None]
"""Function that is called with a description of the part that starts."""
Phased = tuple[float, dict[str, float]]
"""Seconds of a step on this rank that was timed phase by phase, and of each of its phases."""
Take = Callable[[Phase], StepInput]
"""Function that returns the next batch; it runs its work in phases."""


@dataclass(frozen=True)
class Settings:
    """Number of steps to measure."""

    steps: int = 10
    """Steps in a repeat, between two synchronizations."""
    repeats: int = 5
    """Number of repeats."""
    warm_up: int | None = None
    """Warm-up steps; None for as many as it takes until the time is steady."""


def bench(
    recipe: Recipe,
    config: ModelConfig,
    plan: Plan,
    device: torch.device,
    images: ImageSet | None,
    settings: Settings = Settings(),
    *,
    task: Task | None = None,
    begun: float | None = None,
    traces: Path | None = None,
    report: Report = lambda words: None,
) -> dict[str, Any]:
    """Measure the steps of `recipe` under `plan`, and return what `vitpar bench --json` prints. Collective.

    The result is equal on all ranks. Times are in seconds; `repeated` numbers have their mean, deviation and values.
    `share` of the data is the part of a step that synthetic input saves, `between_seconds` the part outside all phases.

    config, plan, task: as for ``vitpar.training.build``.
    images: training set to read; None for synthetic input.
    begun: when the command began, in seconds since the epoch; None leaves the start of the processes out.
    traces: folder for the profiler's traces, one per rank; None for no profile.
    report: called with a description of each part of the measurement when it starts.

    The learning rate is 0, so that every step does the same work, whatever the recipe. Raises DataError for data that
    cannot be used.
    """
    start = {} if begun is None else {"processes": time.time() - begun}
    report("building the model")
    with _timed(start, "model"):
        trained = build(recipe, config, plan, device, task, {TRAINING_DATA: images})
    recipe = trained.recipe
    with _timed(start, "attention"):
        attention = trained.choose_attention()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the choice of attention allocated memory for its trials
    source = trained.input()
    feed = Feed(source, images)
    runner = StepRunner(trained)
    warm_up = runner.warm_up(feed, settings.warm_up, report)
    start = {part: runner.most(took) for part, took in start.items()} | {"first_step": warm_up["first"]}
    memory = int(runner.most(memory_bytes(device)))
    synthetic = Feed(source)
    seconds: list[float] = []
    without: list[float] = []
    phased: list[Phased] = []
    for repeat in range(settings.repeats):
        works = [lambda: seconds.append(runner.run(feed, settings.steps))]
        if images is not None:
            works.append(lambda: without.append(runner.run(synthetic, settings.steps)))
        works.append(lambda: phased.append(runner.phases(feed, settings.steps)))
        report(f"repeat {repeat + 1} of {settings.repeats}")
        for work in works[:: -1 if repeat % 2 else 1]:
            work()
    report("measuring the limits")
    limits = measure_limits(trained)
    kernels = None
    if traces is not None:
        report("recording a trace")
        with runner.open(feed) as take:
            path = traces / f"rank_{dist.get_rank()}.json"
            kernels = record(lambda: runner.step(take), device, path, limits.matmul_rate)
    phases, whole, rates = _over_ranks(phased, limits, peak_flops(device, recipe.train.precision))
    data, size = None, recipe.train.batch_size
    if images is not None:
        data = {
            "name": recipe.data_name,
            "synthetic_step_seconds": repeated(without),
            "share": repeated([1 - bare / full for bare, full in zip(without, seconds, strict=True)]),
            "images_per_second_prepared": all_gather_json(input_rate(recipe, config, device.type))[0],
        }
    flops = with_frozen(config, recipe.frozen(config)).flops * size / statistics.fmean(seconds) / plan.world_size
    return {
        "model": config.name,
        "plan": str(plan),
        "schedule": plan.schedule if plan.pipeline_degree > 1 else None,
        "microbatches": plan.microbatches,
        "ranks": plan.world_size,
        "batch_size": size,
        "precision": recipe.train.precision,
        "compile": trained.model.execution.compile,
        "attention": attention.backend,
        "device": device.type,
        "device_name": device_name(device),
        "start_seconds": start,
        "warm_up": warm_up,
        "steps": settings.steps,
        "step_seconds": repeated(seconds),
        "images_per_second": repeated([size / one for one in seconds]),
        "mfu": rates["peak"] and flops / rates["peak"],
        "matmul_share": flops / rates["matmul"],
        "rates": rates,
        "memory_bytes": memory,
        "data": data,
        "phased_step_seconds": whole,
        "phases": phases,
        "between_seconds": whole["mean"] - sum(phase["seconds"]["mean"] for phase in phases),
        "kernels": kernels,
        "warnings": [*trained.warnings, *filter(None, [attention.warning])],
    }


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the duration of the block to `seconds`, under the name `part`."""
    begun = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - begun


def repeated(values: Sequence[float]) -> dict[str, Any]:
    """Return a measured quantity with one value a repeat: its mean, its sample standard deviation, the values."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "deviation": deviation, "repeats": list(values)}


def _over_ranks(
    phased: list[Phased], limits: PhaseLimits, peak: float | None
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Return phases, step times and rates as means over ranks, so that phases add up to the step. Collective."""
    world = dist.get_world_size()
    every = all_gather_json((phased, asdict(limits)))
    names = dict.fromkeys(name for runs, _ in every for _, phases in runs for name in phases)

    def mean(values: Iterable[float]) -> float:
        return sum(values) / world

    repeats = range(len(phased))
    rows = []
    for name in names:
        each = repeated([mean(runs[n][1].get(name, 0.0) for runs, _ in every) for n in repeats])
        slowest = max(sum(phases.get(name, 0.0) for _, phases in runs) / len(runs) for runs, _ in every)
        bound = [known["phases"][name] for _, known in every if name in known["phases"]]
        limit = sum(bound) / world if bound else None
        rows.append(
            {
                "name": name,
                "seconds": each,
                "slowest_rank_seconds": slowest,
                "limit_seconds": limit,
                "limit_share": None if limit is None or not each["mean"] else limit / each["mean"],
            }
        )
    whole = repeated([mean(runs[n][0] for runs, _ in every) for n in repeats])
    matmul, bandwidth = (mean(known[rate] for _, known in every) for rate in ("matmul_rate", "bandwidth"))
    return rows, whole, {"matmul": matmul, "peak": peak, "bandwidth": bandwidth}


class Feed:
    """Endless source of batches, while it is open. Collective.

    images: read, decoded and augmented by threads, copied to the device, normalised and mixed, as in a training. Each
    time the feed is opened, it continues where it stopped, with empty queues. None: one random batch that stays on the
    device.
    """

    def __init__(self, source: Input, images: ImageSet | None = None) -> None:
        self._images, self._input, self._samples = images, source, 0
        # Prefetched batches would make the first steps look fast. A loader's queues hold two, a stream's two more.
        self.settling = 1 if images is None else 4
        """Number of batches to take before the source delivers at its steady rate."""
        if images is not None:
            source.cache(images)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Yield the function that returns batches."""
        if self._images is None:
            given = self._input.synthetic()
            yield lambda phase: given
            return
        with closing(iter(self._input.train_batches(self._images, start=self._samples))) as batches:

            def take(phase: Phase) -> StepInput:
                with phase("waiting for data"):
                    batch = next(batches)
                with phase("input"):
                    given = self._input.train_step(batch)
                self._samples = batch.samples
                return given

            yield take


STEADY, BETTER, MOST = 3, 0.05, 50
"""The step time is steady when `STEADY` steps in a row are not faster, by the share `BETTER`, than the fastest before
them. Warm-up ends after `MOST` steps in any case."""


class StepRunner:
    """Runner of a model's training steps. All methods are collective."""

    def __init__(self, trained: TrainingComponents) -> None:
        self._model, self._device, self._step = trained.model, trained.model.device, trained.step()
        self._group = ClockedRanks(self._device)

    def step(self, take: Take, phase: Phase = untimed) -> None:
        """Run one step, with learning rate 0."""
        self._step(1, 0.0, *take(phase))

    def most(self, value: float) -> float:
        """Return the largest value over all ranks."""
        return self._group.agree([value])[0]

    @contextmanager
    def open(self, feed: Feed) -> Iterator[Take]:
        """Yield the open feed with its queues filled as in the middle of a training."""
        with feed.opened() as take, Garbage():
            for _ in range(feed.settling):
                self.step(take)
            yield take

    def warm_up(self, feed: Feed, wanted: int | None, report: Report) -> dict[str, Any]:
        """Run steps until their time is steady, or `wanted` steps.

        Returns their number, the seconds of the first, and whether the time had stopped falling.
        """
        taken: list[float] = []
        fastest, since = float("inf"), 0
        with feed.opened() as take:
            while len(taken) < (MOST if wanted is None else wanted) and (wanted is not None or since < STEADY):
                report(f"warming up, step {len(taken) + 1}")
                begun = self._synchronised()
                self.step(take)
                taken.append(self.most(self._synchronised() - begun))
                since = 0 if taken[-1] < (1 - BETTER) * fastest else since + 1
                fastest = min(fastest, taken[-1])
        return {"steps": len(taken), "first": taken[0] if taken else 0.0, "steady": since >= STEADY}

    def run(self, feed: Feed, steps: int) -> float:
        """Return the mean seconds of a step on the slowest rank."""
        with self.open(feed) as take:
            begun = self._synchronised()
            for _ in range(steps):
                self.step(take)
            return self.most(self._synchronised() - begun) / steps

    def phases(self, feed: Feed, steps: int) -> Phased:
        """Return the seconds of a step and of its phases on this rank."""
        clock = PhaseClock(self._device)
        with self.open(feed) as take:
            self._synchronised()
            self._model.phase = clock
            try:
                begun = time.perf_counter()
                for _ in range(steps):
                    self.step(take, clock)
                totals = clock.read()
                whole = time.perf_counter() - begun
            finally:
                self._model.phase = untimed
        return whole / steps, {name: seconds / steps for name, seconds in totals.items()}

    def _synchronised(self) -> float:
        """Return the time at which all ranks have finished their work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._group.meet()
        return time.perf_counter()
