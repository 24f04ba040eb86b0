"""Thread of a tracker: bounded, in order, and unable to hold up the run."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_trackio import FakeTrackio
from vitpar.training import tracking
from vitpar.training.tracking import TrackedRun, Tracker

LONG = 60.0
"""Seconds that are more than a tracker needs."""
FAILED = "the tracker trackio failed, and the run continues without it: "


@pytest.fixture
def trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTrackio:
    """Return the fake package, installed."""
    return FakeTrackio(tmp_path, monkeypatch)


def run_facts(folder: Path, **changed: Any) -> TrackedRun:
    facts: dict[str, Any] = {"folder": str(folder), "id": "abc", "name": "mine", "project": "ours", "online": False}
    facts |= {"done": 0, "tracked": 0, "resumed": False, "recipe": {"train": {"lr": 0.5, "steps": None}}}
    return TrackedRun(**{**facts, "facts": {"plan": "dp1"}, "texts": {"recipe.toml": "[train]"}, **changed})


def ended(sent: Tracker, seconds: float = LONG) -> str | None:
    """Close the tracker, wait for it, and return its warning."""
    sent.close(failed=False)
    sent.join(time.monotonic() + seconds)
    return sent.problem()


def test_tracker_gets_everything_in_order_and_prints_nothing(
    tmp_path: Path, trackio: FakeTrackio, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/dashboard")
    trackio.misbehave("print in log")
    sent = Tracker("trackio", run_facts(tmp_path))
    for step in range(1, 51):
        sent.put(step, {"loss": 1 / step})
    assert ended(sent) is None and capfd.readouterr().out == ""
    begin, *steps, end = trackio.calls()
    assert begin["call"] == "init" and begin["project"] == "ours" and begin["name"] == "mine-abc"
    assert begin["config"] == {"recipe": {"train": {"lr": 0.5, "steps": None}}, "plan": "dp1"}
    assert begin["resume"] == "never" and begin["automatic"] == [False, False]
    assert begin["space"] is None, "trackio would send to that dashboard"
    assert [(call["step"], call["metrics"]) for call in steps] == [(n, {"loss": 1 / n}) for n in range(1, 51)]
    assert end["call"] == "finish"


def test_resumed_run_keeps_its_name_and_repeats_no_step(tmp_path: Path, trackio: FakeTrackio) -> None:
    sent = Tracker("trackio", run_facts(tmp_path, resumed=True, done=2, tracked=4))
    for step in (3, 4, 5):
        sent.put(step, {"loss": 0.0})
    assert ended(sent) is None
    assert [(call["resume"], call["name"]) for call in trackio.calls("init")] == [("allow", "mine-abc")]
    assert [call["step"] for call in trackio.calls("log")] == [5]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise in import", "ImportError: a library is missing"),
        *((f"raise in {place}", "RuntimeError: [red]no \\x1b[2J disk and") for place in ("init", "log", "finish")),
        ("exit in log", "SystemExit: 3"),
    ],
)
def test_error_of_a_tracker_is_one_line(fault: str, said: str, tmp_path: Path, trackio: FakeTrackio) -> None:
    trackio.misbehave(fault)
    sent = Tracker("trackio", run_facts(tmp_path))
    sent.put(1, {"loss": 0.0})
    problem = ended(sent)
    assert problem is not None and problem.startswith(f"{FAILED}{said}")
    assert len(problem) < 300 and "\n" not in problem
    assert sent.problem() is None, "reported once"


@pytest.mark.parametrize(
    ("place", "rows", "said"),
    [
        ("init", 1, "a call did not return in 0 s"),
        ("log", 9, "it is too slow: 5 rows wait for it"),
        ("finish", 1, "it did not finish in time, so its last values may be missing"),
    ],
)
def test_tracker_that_blocks_is_given_up(
    place: str, rows: int, said: str, tmp_path: Path, trackio: FakeTrackio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "CAPACITY", 5)
    monkeypatch.setattr(tracking, "CALL_S", 0.0 if place == "init" else LONG)
    trackio.misbehave(f"block in {place}")
    sent = Tracker("trackio", run_facts(tmp_path))
    for step in range(rows):
        sent.put(step, {"loss": 0.0})
    assert ended(sent, seconds=0.1) == f"{FAILED}{said}"
    hanging = [thread for thread in threading.enumerate() if thread.name.startswith(tracking._THREADS)]
    assert tracking.are_hanging() and hanging and all(thread.daemon for thread in hanging)
