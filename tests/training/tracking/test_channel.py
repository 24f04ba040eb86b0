"""Channel to a tracker's process: bounded, in order, and unable to hold up the run."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_trackio import FakeTrackio
from vitpar.training.tracking import channel
from vitpar.training.tracking.channel import Channel
from vitpar.training.tracking.tracked_run import TrackedRun

LONG = 60.0
"""Seconds that are more than a tracker needs."""


@pytest.fixture
def trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTrackio:
    """Return the fake package, installed."""
    return FakeTrackio(tmp_path, monkeypatch)


def run_facts(folder: Path, **changed: Any) -> TrackedRun:
    facts: dict[str, Any] = {"folder": str(folder), "id": "abc", "name": "mine", "project": "ours", "online": False}
    facts |= {"done": 0, "tracked": 0, "resumed": False, "recipe": {"train": {"lr": 0.5, "steps": None}}}
    return TrackedRun(**{**facts, "facts": {"plan": "dp1"}, "texts": {"recipe.toml": "[train]"}, **changed})


def message(step: int, **values: float) -> dict[str, Any]:
    return {"step": step, "time": 1.0, "values": values}


def ended(sent: Channel, seconds: float = LONG, failed: bool = False) -> str | None:
    """Close the channel, wait for it, and return its warning."""
    sent.close(failed)
    sent.join(time.monotonic() + seconds)
    return sent.problem()


def test_tracker_gets_everything_in_order(
    tmp_path: Path, trackio: FakeTrackio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/dashboard")
    trackio.misbehave("print in log")
    sent = Channel("trackio", run_facts(tmp_path))
    for step in range(1, 51):
        sent.put(message(step, loss=1 / step))
    assert ended(sent) is None
    begin, *steps, end = trackio.calls()
    assert begin["call"] == "init" and begin["project"] == "ours" and begin["name"] == "mine-abc"
    assert begin["config"] == {"recipe": {"train": {"lr": 0.5, "steps": None}}, "plan": "dp1"}
    assert begin["resume"] == "never" and begin["automatic"] == [False, False]
    assert begin["space"] is None, "trackio would send to that dashboard"
    assert [(call["step"], call["metrics"]) for call in steps] == [(n, {"loss": 1 / n}) for n in range(1, 51)]
    assert end["call"] == "finish"


def test_resumed_run_keeps_its_name_and_repeats_no_step(tmp_path: Path, trackio: FakeTrackio) -> None:
    sent = Channel("trackio", run_facts(tmp_path, resumed=True, done=2, tracked=4))
    for step in (3, 4, 5):
        sent.put(message(step, loss=0.0))
    assert ended(sent) is None
    assert [(call["resume"], call["name"]) for call in trackio.calls("init")] == [("allow", "mine-abc")]
    assert [call["step"] for call in trackio.calls("log")] == [5]


FAULTS = {
    "raise in import": "ImportError: a library is missing",
    **{f"raise in {place}": "RuntimeError: [red]no \\x1b[2J disk and" for place in ("init", "log", "finish")},
    "exit in log": "its process ended with exit code 3",
}


def test_error_of_a_tracker_is_one_line(tmp_path: Path, trackio: FakeTrackio) -> None:
    channels = {}
    for fault in FAULTS:  # all processes run at once
        trackio.misbehave(fault)
        sent = channels[fault] = Channel("trackio", run_facts(tmp_path))
        while sent._process is None:
            time.sleep(0.01)
        sent.put(message(1, loss=0.0))
    for fault, sent in channels.items():
        problem = ended(sent)
        assert problem is not None, fault
        assert problem.startswith("the tracker trackio failed, and the run continues without it: ")
        assert FAULTS[fault] in problem and len(problem) < 300 and "\n" not in problem
        assert sent.problem() is None, "reported once"


@pytest.mark.parametrize("place", ["init", "finish"])
def test_tracker_that_blocks_is_ended(place: str, tmp_path: Path, trackio: FakeTrackio) -> None:
    trackio.misbehave(f"block in {place}")
    sent = Channel("trackio", run_facts(tmp_path))
    sent.put(message(1, loss=0.0))
    while sent._process is None:
        time.sleep(0.01)
    assert "did not finish in time" in (ended(sent, seconds=0.1) or "")
    assert sent._process.wait(LONG) == -signal.SIGKILL
    sent._thread.join(LONG)
    assert not sent._thread.is_alive()


def test_queue_is_bounded_and_drops_the_oldest(
    tmp_path: Path, trackio: FakeTrackio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "CAPACITY", 5)
    read, write = os.pipe()  # the tracker waits until the test closes `write`
    monkeypatch.setattr(channel.Channel, "_started", _started_after(read))
    sent = Channel("trackio", run_facts(tmp_path))
    for step in range(1, 101):
        sent.put(message(step, loss=0.0))
        assert len(sent._waiting) <= 5
    assert [waiting["step"] for waiting in sent._waiting] == [96, 97, 98, 99, 100]
    os.close(write)
    problem = ended(sent)
    assert problem == "the tracker trackio was too slow: its oldest 95 rows that waited were dropped"
    assert [call["step"] for call in trackio.calls("log")] == [96, 97, 98, 99, 100]
    assert trackio.calls()[-1]["call"] == "finish"


def _started_after(read: int) -> Any:
    """Return a method that starts the process when the other end of the pipe `read` is closed."""
    started = Channel._started

    def waiting(self: Channel) -> Any:
        os.read(read, 1)
        return started(self)

    return waiting
