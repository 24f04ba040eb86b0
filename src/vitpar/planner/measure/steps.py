"""Measurement of training steps of plans: their time, and the peak memory of every rank."""

from __future__ import annotations

import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from vitpar.errors import StrategyError
from vitpar.launch.process_group import join, leave
from vitpar.launch.report import watch_parent
from vitpar.launch.resources import freed_memory_given_back
from vitpar.launch.store import meeting_place
from vitpar.launch.world import World
from vitpar.launch.world_group import all_gather_json, barrier
from vitpar.models.config import ModelConfig
from vitpar.planner.measure.clock import ClockedRanks
from vitpar.planner.measure.device import Peak
from vitpar.recipe import Recipe
from vitpar.strategy import Plan, parse, validate
from vitpar.strategy.support import refuse_clashes
from vitpar.text import divisors
from vitpar.training.build import build

T = TypeVar("T")

AGREED = 0.1  # largest relative difference of a plan's two runs that needs no third run
LEADING, TURNS = 4, 4  # plans that take turns at the end, and runs of each then


@dataclass(frozen=True)
class Training:
    """A training to measure, on random images."""

    recipe: Recipe
    """Settings of the training."""
    config: ModelConfig
    """Shape of the model."""

    def step(self, plan: Plan, device: torch.device) -> Callable[[], None]:
        """Return a function that runs one step of the trainer, without loading data or writing records. Collective."""
        trained = build(self.recipe, self.config, plan, device)
        trained.choose_attention()
        update = trained.step()
        batch = trained.input().synthetic()

        def step() -> None:
            update(1, self.recipe.lr, *batch)

        return step

    def peak(self, plan: Plan, device: torch.device) -> int | None:
        """Return the peak bytes of a step above those before the model was built; None where they are not reported."""
        peak = Peak(device)
        step = self.step(plan, device)
        step()
        peak.forget()
        step()
        return peak.grown


@dataclass(frozen=True)
class Measured:
    """Measurements of one plan."""

    runs: tuple[tuple[float, ...], ...]
    """Seconds of each step on the slowest rank, of one or more runs, minutes apart."""
    memory: tuple[int | None, ...]
    """Peak bytes of each rank; None where the system reports no peak."""

    @property
    def apart(self) -> float:
        """Return the relative difference between the slowest and the fastest run."""
        middles = list(map(statistics.median, self.runs))
        return max(middles) / min(middles) - 1

    @property
    def middle(self) -> float:
        """Return the seconds of a step: the median over the runs of their medians."""
        return statistics.median(map(statistics.median, self.runs))


class PlanRunner:
    """Runner of plans, each in new processes that are forked from the ranks of `world`.

    device_type: type of the device.
    seconds: approximate time of a run's timed steps. There are at least three, after two warm-up steps.
    """

    def __init__(self, world: World, device_type: Literal["cpu", "cuda"], seconds: float = 2.0) -> None:
        self._world, self._device_type, self._seconds, self._worlds = world, device_type, seconds, 0
        self._store = meeting_place(world)  # served by rank 0; every forked process opens its own connection

    def measure(self, training: Training, plans: Sequence[Plan], favourite: int) -> Iterator[tuple[int, Measured]]:
        """Measure plans and yield (index of a plan, its measurements until now) after each run.

        All plans run once, then all again, so that a slow minute of the machine affects one run of a plan only. Plans
        whose two runs disagree by more than `AGREED` run a third time. Then the favourite and the fastest of the others
        take turns, so that they are compared in the same minutes. Collective; equal for all ranks.

        plans: validated plans of as many ranks as the world.
        favourite: index of the plan to compare with the fastest others.
        """
        done = list[Measured]()
        for index, plan in enumerate(plans):
            memory = self.memory(training, plan)
            done.append(Measured((self.run(training, plan),), memory))
            yield index, done[-1]

        def again(index: int) -> tuple[int, Measured]:
            runs = *done[index].runs, self.run(training, plans[index])
            done[index] = replace(done[index], runs=runs)
            return index, done[index]

        yield from map(again, range(len(plans)))
        yield from map(again, [index for index, measured in enumerate(done) if measured.apart > AGREED])
        order = sorted(range(len(plans)), key=lambda index: done[index].middle)
        leading = [favourite, *(index for index in order if index != favourite)][:LEADING]
        yield from map(again, leading * TURNS if len(leading) > 1 else [])

    def memory(self, training: Training, plan: Plan) -> tuple[int | None, ...]:
        """Return the peak bytes of each rank, None where the system reports none. Collective; equal for all ranks."""
        return self._run(lambda device: _memory(training, plan, device))

    def run(self, training: Training, plan: Plan) -> tuple[float, ...]:
        """Run a plan and return the seconds of its timed steps. Collective; equal for all ranks."""
        return self._run(lambda device: _steps(training, plan, device, self._seconds))

    def _run(self, work: Callable[[torch.device], T]) -> T:
        """Return what `work` returns in a new world of forked processes."""
        self._worlds += 1

        def joined() -> T:
            store = None
            if self._store is not None:
                w = self._world
                store = dist.PrefixStore(str(self._worlds), dist.TCPStore(w.master_addr, w.master_port, w.size, False))
            result = work(join(self._world, self._device_type, store=store))
            leave()
            return result

        return run_in_subprocess(joined)


def _memory(training: Training, plan: Plan, device: torch.device) -> tuple[int | None, ...]:
    """Return the peak bytes of each rank, above those before the model was built."""
    with freed_memory_given_back():
        if device.type == "cpu":
            # A step of a tiny model loads libraries and makes connections first, which are not the plan's memory.
            replace(training, config=training.config.tiny).step(plan, device)()
        grown = training.peak(plan, device)
    return tuple(all_gather_json(grown))


def _steps(training: Training, plan: Plan, device: torch.device, seconds: float) -> tuple[float, ...]:
    """Time steps of a plan for about `seconds`, at least three, after two warm-up steps. Collective."""
    step = training.step(plan, device)
    step()
    step()
    group, taken = ClockedRanks(device), list[float]()
    while len(taken) < 3 or sum(taken) < seconds:
        barrier()
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken += group.agree([time.perf_counter() - begun])
    return tuple(taken)


def run_in_subprocess(work: Callable[[], T]) -> T:
    """Return what `work` returns in a process forked from this one, which must not have used a GPU.

    The process takes threads of process groups and leftover memory with it when it ends. Raises what `work` raises, or
    RuntimeError if the process dies.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        done, result = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process that ran a plan exited with code {process.exitcode}") from None
    process.join()
    if not done:
        raise result
    return result


def _send_result(work: Callable[[], T], connection: Connection) -> None:
    """Send (True, result of `work`) or (False, exception with its traceback as a note)."""
    watch_parent()
    try:
        answer: tuple[bool, T | BaseException] = (True, work())
    except BaseException as error:
        error.add_note(traceback.format_exc())
        answer = (False, error)
    try:
        connection.send(answer)
    except (TypeError, AttributeError):  # the exception cannot be pickled
        connection.send((False, RuntimeError(str(answer[1]))))


DATA = ("dp{n}", "fsdp{n}", "dp{n}+zero1", "dp{n}+zero2", "dp{n}+ckpt", "fsdp{n}+ckpt.selective")
TENSOR = ("tp{n}", "tp{n}+sp", "tp{n}+2d", "tp{n}+3d")
TWO = ("dp{a}xfsdp{b}", "dp{a}xtp{b}", "tp{a}xdp{b}", "tp{a}xfsdp{b}", "tp{a}xdp{b}+sp")
PIPELINES = ("pp{a}xdp{b}", "pp{a}xfsdp{b}", "pp{a}xtp{b}")


def example_plans(config: ModelConfig, ranks: int, batch_size: int, precision: str, compiled: bool) -> Iterator[Plan]:
    """Yield validated example plans that fit the model and the batch.

    They cover every role alone and combined, checkpointing, layerwise plans, and pipelines with several schedules and
    numbers of micro-batches. Plans that do not fit are left out.
    """
    splits = [(a, ranks // a) for a in divisors(ranks) if 1 < a < ranks]
    middle = config.num_blocks // 2
    words: list[tuple[str, dict[str, Any]]] = [(text.format(n=ranks), {}) for text in (*DATA, *TENSOR)]
    words += [(f"{role}{ranks}", {"microbatches": m}) for role in ("dp", "fsdp") for m in (2, 4)]
    words += [(f"tp{ranks}", {"microbatches": 4}), (f"dp{ranks}+zero1", {"microbatches": 2})]
    words += [(text.format(a=a, b=b), {}) for a, b in splits for text in TWO]
    pipelines = [text.format(a=a, b=b) for a, b in splits for text in PIPELINES] + [f"pp{ranks}"]
    words += [(text, {"microbatches": m}) for text in pipelines for m in (4, 8)]
    words += [(f"pp{ranks}", {"microbatches": m, "schedule": "gpipe"}) for m in (4, 8)]
    words += [(pipelines[0], {"microbatches": 4, "schedule": "interleaved1f1b", "virtual_stages": 2})]
    words += [(f"pp{ranks}", {"microbatches": 8, "schedule": "zbvzerobubble", "virtual_stages": 2})]
    words += [(f"pp1: 0-{middle - 1}=dp{ranks}, *=fsdp{ranks}", {})]
    words += [(f"pp{a}: 0-{middle - 1}=dp{b}, *=tp{b}", {"microbatches": 4}) for a, b in splits[:1]]
    plans: dict[Plan, None] = {}
    for text, fields in words:
        try:
            plan = validate(replace(parse(text), **fields), config, batch_size)
            refuse_clashes(plan, precision, compiled)
        except StrategyError:
            continue
        plans[plan] = None
    yield from plans
