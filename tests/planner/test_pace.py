"""Normalisation of timings to a constant CPU speed, and corrections of profiles from measured plans."""

import math
from collections.abc import Iterator
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from vitpar.errors import PlannerError
from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.measure import clock as clocks
from vitpar.planner.measure.clock import PACES, Clock, CpuSpeedProbe, Neighbours, core_use, others_share
from vitpar.planner.measure.steps import TURNS, Measured, PlanRunner, PlanSteps
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import FITTED, estimate_model, tensors
from vitpar.planner.profile.profiles import Hardware, ModelProfile
from vitpar.planner.report.accuracy import (
    LEAST,
    Correction,
    accuracy,
    correction,
    measured_before,
    measured_row,
    time_error,
)
from vitpar.strategy import parse, validate

CONFIG = model_config("vit_custom", embed_dim=64, depth=2, num_heads=4, patch_size=8, image_size=32, num_classes=10)
HARDWARE = find_cluster("4xA100").hardware()


def priced(mesh: str, hardware: Hardware) -> Price:
    """Return the price of a plan for 32 images by a model's profile of pace 1."""
    model = estimate_model(CONFIG, "fp32", HARDWARE, tensors(CONFIG, 4), fitted=FITTED._replace(host=0.0))
    model = model.model_copy(update={"pace": 1.0})
    return price(validate(parse(mesh), CONFIG, 32), LayerCosts(CONFIG, hardware, model), 32)


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Yield a list of readings for `CpuSpeedProbe`. The first readings are 1.

    Each reading advances the clock by one second.
    """
    later: list[float] = []
    read: Iterator[float] = chain(repeat(1.0, PACES), later)
    seconds = map(float, count())
    monkeypatch.setattr(CpuSpeedProbe, "read", lambda self: next(read))
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: next(seconds))
    yield later


def test_timings_are_divided_by_the_surrounding_pace(paces: list[float]) -> None:
    paces += [2.0, 2.0, 2.0, 4.0, 4.0, 4.0]  # five readings at 2, 2, 3, 4, 4
    clock = Clock(torch.device("cpu"), Neighbours(0, 1, None), 0.01)
    forward, backward = clock.timings(7, lambda: None, lambda: None)
    assert clock.pace == 1.0 and forward.samples == 5 and forward == backward
    assert forward.seconds == pytest.approx(1 / 3) and forward.spread == pytest.approx((1 / 2 - 1 / 4) / 2 * 3)


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


def test_profiles_of_different_pace_are_normalised() -> None:
    """The machine was twice as slow when its links were measured."""
    slow = HARDWARE.slower(2.0, 2.0).model_copy(update={"pace": 2.0})
    there = priced("dp2xtp2", HARDWARE).seconds
    assert priced("dp2xtp2", slow).seconds == pytest.approx(there)
    assert priced("dp2xtp2", slow.model_copy(update={"pace": 0.0})).seconds > 1.05 * there


def test_measured_steps_are_compared_at_the_profiled_pace() -> None:
    predicted = priced("dp4", HARDWARE)
    s = predicted.seconds
    measured = Measured((PlanSteps((2 * s, 3 * s, 8 * s), (0.002, 0.003, 0.004)),), (None,) * 4)
    row = measured_row(predicted, measured, 0.001)
    assert time_error(row) == pytest.approx(0.0) and row["measured_seconds"] == pytest.approx(s)
    found = accuracy([row], 0.001)
    assert found["slowdown"] == pytest.approx(3.0) and found["repeat"] is None
    assert found["clocked_time_error"]["mean"] == pytest.approx(2 / 3) and found["time_error"]["mean"] < 1e-9
    unknown = measured_row(predicted, measured, 0.0)
    assert unknown["measured_seconds"] == unknown["clocked_seconds"] == pytest.approx(3 * s)
    assert accuracy([unknown])["slowdown"] == 1.0 and accuracy([unknown])["memory_error"] is None


def stat(tmp_path: Path, *busy: int) -> Path:
    """Write a /proc/stat in which every core worked `busy` ticks: for users, and stolen by other virtual machines."""
    user, steal = busy
    path = tmp_path / "stat"
    lines = [f"cpu{number} {user} 0 0 5000 7 0 0 {steal} 0 0" for number in range(4096)]
    path.write_text("\n".join(["cpu  1 2 3", *lines, "intr 5"]))
    return path


def test_other_programs_share_is_what_ranks_did_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores work 14 s in total during 10 s, of which two ranks use 9 s."""
    monkeypatch.setattr(clocks.os, "sched_getaffinity", lambda _: {3, 5})
    ticks = clocks.os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(clocks.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(clocks.time, "process_time", lambda: 1.0)
    before = core_use(stat(tmp_path, 10 * ticks, 0))
    monkeypatch.setattr(clocks.time, "monotonic", lambda: 110.0)
    monkeypatch.setattr(clocks.time, "process_time", lambda: 5.5)
    after = core_use(stat(tmp_path, 15 * ticks, 2 * ticks))
    assert before is not None and after is not None
    used = tuple(b - a for a, b in zip(before, after, strict=True))
    assert used == pytest.approx((14.0, 4.5, 20.0))
    assert others_share([("here", *used)] * 2) == pytest.approx(5 / 20)
    assert others_share([("here", *used), ("there", *used)]) == pytest.approx(9.5 / 20), "each machine by itself"
    assert others_share([("here", 8.0, 4.5, 20.0)] * 2) == 0.0, "ticks are rounded"
    assert others_share([("here", 0.01, 0.0, 0.02)]) is None, "too short to tell"


class Unsteady(PlanRunner):
    """Runner whose second plan meets a slow minute in its second run."""

    def __init__(self, *first: float) -> None:
        self.seconds = iter((*(first or (1.0, 2.0, 1.05, 7.0, 2.2)), *(1.0, 2.2) * TURNS))

    def memory(self, training: object, plan: object) -> tuple[int]:
        return (100,)

    def run(self, training: object, plan: object) -> PlanSteps:
        return PlanSteps((next(self.seconds),) * 3)


def test_plans_with_inconsistent_runs_are_repeated() -> None:
    """At the end the fastest plans run in turns, so that slow phases of the machine hit all of them."""
    runs = list(Unsteady().measure(None, [parse("dp4"), parse("tp4")], 0))  # type: ignore[arg-type]
    assert [index for index, _ in runs] == [0, 1, 0, 1, 1, *[0, 1] * TURNS]
    stopped = [runs[2][1], runs[1][1]]  # after three runs: a resumed validation repeats none of them
    rest = Unsteady(1.05, 7.0, 2.2).measure(None, [parse("dp4"), parse("tp4")], 0, stopped)  # type: ignore[arg-type]
    assert [index for index, _ in rest][:2] == [1, 1]
    first, second = runs[2][1], runs[-1][1]
    assert first.apart == pytest.approx(0.05) and second.apart == pytest.approx(2.5) and second.memory == (100,)
    price = priced("dp4", HARDWARE)
    row = measured_row(price, second, 0.0)
    assert measured_before([price], [row]) == [second]
    with pytest.raises(PlannerError, match=r"row 1 is of dp2, not of 'dp4'"):
        measured_before([price], [row | {"strategy": "dp2"}])
    with pytest.raises(PlannerError, match=r"row 1 is damaged \(KeyError\)"):
        measured_before([price], [{}])
    assert row["measured_seconds"] == pytest.approx(2.2)
    assert accuracy([row])["repeat"] == pytest.approx({"mean": 2.5, "largest": 2.5})


LARGER = model_config("vit_custom", embed_dim=256, depth=4, num_heads=4, patch_size=8, image_size=64, num_classes=10)
PLANS = ("dp4", "fsdp4", "tp4", "dp2xtp2", "tp4+sp", "dp4+zero1")


def profiles() -> tuple[Hardware, ModelProfile]:
    hardware = find_cluster("4xA100").hardware()
    return hardware, estimate_model(LARGER, "fp32", hardware, tensors(LARGER, 4))


def prices(hardware: Hardware, model: ModelProfile) -> list[Price]:
    costs = LayerCosts(LARGER, hardware, model)
    return [price(validate(parse(words), LARGER, 32), costs, 32) for words in PLANS]


def row(computing: float, sending: float, measured: float, missing: int | None = None) -> dict[str, Any]:
    """Return the row of a plan that takes `measured` seconds, and `missing` bytes more than predicted."""
    return {
        "predicted_seconds": computing + sending,
        "predicted_breakdown_seconds": {"forward": computing, "tensor": sending},
        "measured_seconds": measured,
        "predicted_memory_bytes": 0,
        "measured_memory_bytes": [missing],
    }


def test_correction_recovers_known_factors() -> None:
    """The steps take 1.5 times the predicted computing and 0.8 times the predicted sending."""
    parts = [(1.0, 0.1), (2.0, 1.0), (1.0, 3.0), (4.0, 0.0)]
    found = correction([row(c, s, 1.5 * c + 0.8 * s, 30) for c, s in parts])
    assert found.computing == pytest.approx(1.5) and found.sending == pytest.approx(0.8)
    assert found.memory_bytes == 30 and found.plans == 4
    # Plans that do not distinguish the two get one factor.
    found = correction([row(1, 1, 3)] * 2)
    assert found.computing == found.sending == pytest.approx(1.5) and found.memory_bytes == 0
    assert correction([row(1000, 0, 1, -5)]).computing == LEAST
    # The best fit has a negative factor for sending.
    absurd = correction([row(1, 0.01, 1.2), row(1, 0.02, 1)])
    assert absurd.computing == absurd.sending > 0


def test_corrected_profiles_predict_the_measurements(tmp_path: Path) -> None:
    """The true machine computes 1.4 times and sends 2 times as long, and needs 50 MB more.

    One round corrects all three.
    """
    hardware, model = profiles()
    truth = Correction(1.4, 2.0, 50_000_000, 1).of(hardware, model)
    done = [Measured((PlanSteps((p.seconds,)),), (round(p.memory_bytes),)) for p in prices(*truth)]
    rows = [measured_row(p, one, 0.0) for p, one in zip(prices(hardware, model), done, strict=True)]
    found = correction(rows)
    better = found.of(hardware, model)
    for record, name in zip(better, ("hardware.json", "model.json"), strict=True):
        record.save(tmp_path / name)
    read = Hardware.read(tmp_path / "hardware.json"), ModelProfile.read(tmp_path / "model.json")
    after = accuracy([measured_row(p, one, 0.0) for p, one in zip(prices(*read), done, strict=True)])
    assert accuracy(rows)["time_error"]["mean"] > 0.25 and after["time_error"]["mean"] < 0.02
    assert after["memory_error"]["largest"] < 1e-6
    assert "from 6 plans" in read[0].measured["corrected"] and "corrected" in read[1].measured
    assert prices(*read)[0].memory[0].reserved == 50_000_000
