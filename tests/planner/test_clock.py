"""Timing of work, and of plans in turns."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from helpers.planner_reports import costs_of
from vitpar.planner.cost.price import price
from vitpar.planner.measure import clock as clocks
from vitpar.planner.measure.clock import Clock, Neighbours
from vitpar.planner.measure.steps import TURNS, PlanRunner
from vitpar.planner.report.accuracy import accuracy, measured_row
from vitpar.strategy import parse, validate


@pytest.mark.parametrize(("shared", "seconds"), [(False, 2.0), (True, 3.0)])
def test_slowest_process_counts_where_processes_share_cores(shared: bool, seconds: float) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        agreed = pool.map(lambda rank: Neighbours(rank, 2, store, shared).agree([1.0 + 2 * rank]), range(2))
    assert list(agreed) == [[seconds]] * 2


@pytest.mark.parametrize(("gpu", "host"), [(3.0, 5.0), (3.0, 1.0)])
def test_gpu_computes_while_the_host_queues(gpu: float, host: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a GPU: its queue runs 20 ms late. Times of a phase are in ms."""
    now = {"host": 0.0, "gpu": 0.0}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = math.nan

        def record(self) -> None:
            self.at = max(now.values())

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    def synchronize(device: object = None) -> None:
        now["host"] = now["gpu"] = max(now.values())

    def sleep(cycles: int) -> None:
        now["gpu"] = max(now.values()) + cycles / 2e6

    def phase() -> None:
        now["host"] += host
        now["gpu"] = max(now.values()) + gpu

    for name, stand_in in (("Event", Event), ("_sleep", sleep), ("synchronize", synchronize)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now["host"] / 1e3)
    clock = Clock(torch.device("cuda"), Neighbours(0, 1, None), 0.01)
    assert clock.timings(7, phase, phase, host=False)[1].seconds == pytest.approx(1e-3 * gpu)
    assert clock.timings(7, phase, phase)[1].seconds == pytest.approx(1e-3 * max(gpu, host))
    assert clock.timing(7, phase).seconds == pytest.approx(1e-3 * (gpu + host))


class Unsteady(PlanRunner):
    """Runner whose second plan meets a slow minute in its second run."""

    def __init__(self, *first: float) -> None:
        self.seconds = iter((*(first or (1.0, 2.0, 1.05, 7.0, 2.2)), *(1.0, 2.2) * TURNS))

    def memory(self, training: object, plan: object) -> tuple[int]:
        return (100,)

    def run(self, training: object, plan: object) -> tuple[float, ...]:
        return (next(self.seconds),) * 3


def test_plans_with_inconsistent_runs_are_repeated() -> None:
    """At the end the fastest plans run in turns, so that slow phases of the machine hit all of them."""
    runs = list(Unsteady().measure(None, [parse("dp4"), parse("tp4")], 0))  # type: ignore[arg-type]
    assert [index for index, _ in runs] == [0, 1, 0, 1, 1, *[0, 1] * TURNS]
    first, second = runs[2][1], runs[-1][1]
    assert first.apart == pytest.approx(0.05) and second.apart == pytest.approx(2.5) and second.memory == (100,)
    config = costs_of().config
    row = measured_row(price(validate(parse("dp8"), config, 64), costs_of(), 64), second)
    assert row["measured_seconds"] == pytest.approx(2.2)
    assert accuracy([row])["repeat"] == pytest.approx({"mean": 2.5, "largest": 2.5})
