"""Hung runs: each responsive rank notices, the run ends with one error line, and each rank dumps its stacks to disk."""

import ctypes
import os
import platform
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.command_line import started
from helpers.killed_runs import alive, lines, ranks_of, wait_for
from helpers.ranks import exits, two_ranks
from helpers.trained import recipe_text
from vitpar.launch import ALONE, find_world, join
from vitpar.recipe import read_recipe
from vitpar.runs.folder import RunRecord
from vitpar.training.faults import watchdog
from vitpar.training.faults.watchdog import Note, Watchdog, behind, verdict
from vitpar.training.saving.resume import changes

HOST = re.escape(platform.node())
RECIPE = recipe_text(
    **{"data.path": "data", "data.workers": 0, "train.steps": 100_000, "train.batch_size": 8, "train.log_every": 1},
    **{"model.depth": 2, "checkpoint.every": 0, "faults.hang_minutes": 0.05},
)


@contextmanager
def training(place: Path, name: str, mesh: str) -> Iterator["tuple[subprocess.Popen[str], list[int]]"]:
    """Start a run, wait until it trains, and yield its process and the process ids of its ranks."""
    words = ["--recipe", "recipe.toml", "--mesh", mesh, "--run-dir", name, "--set", "train.eval_every=100000"]
    process = started(place, ["train", *words])
    try:
        wait_for(lambda: lines(place / name) > 3, process)
        yield process, ranks_of(process.pid)
    finally:
        process.kill()


@pytest.mark.slow
def test_rank_stopped_by_sigstop_ends_the_run_with_one_error_line(place: Path) -> None:
    """A stopped rank cannot answer the watchdog, so the other ranks must notice and name it."""
    name = "stopped"
    with training(place, name, "dp2") as (process, ranks):
        os.kill(
            next(pid for pid in ranks if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()), signal.SIGSTOP
        )
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1
        assert re.match(rf"error: the run hangs: rank 1 on {HOST} gave no sign of life for \S+ s: its ", errors)
        assert errors.count("\n") == 1 and errors.endswith(f"stacks are in '{name}/hang'\n"), errors
        assert "computing step" in errors
        wait_for(lambda: not alive(ranks), process, ended=True)
    dumps = {path.name: path.read_text() for path in (place / name / "hang").iterdir()}
    assert dumps.keys() == {"rank0.txt"}
    # A rank waits in one of the step's collectives: activations or gradients, their norm, or the logged losses.
    waits = ("forward_backward", "total_norms", "flush")
    for text in dumps.values():
        assert "(most recent call first):" in text and any(name in text for name in waits), text
    assert "error: the run hangs" in (place / name / "log.txt").read_text()
    record = RunRecord(place / name)
    assert record.state == "failed" and record.note.startswith("the run hangs: rank 1 on ")


HELD = """
import sys, time
from vitpar.training.trainer import Trainer
real = Trainer.step
def step(self, number, batch):
    if number == 5 and self.rank == 1:
        time.sleep(1000)
    return real(self, number, batch)
Trainer.step = step
from vitpar_cli.main import main
if __name__ == "__main__":
    main()
"""


def held(place: Path) -> None:
    """Train a rank of dp2; rank 1 sleeps in step 5."""
    os.chdir(place)
    words = ["--recipe", "recipe.toml", "--mesh", "dp2", "--run-dir", "held", "--set", "train.eval_every=1000"]
    sys.argv = ["vitpar", "train", *words]
    runpy.run_path("held.py", run_name="__main__")


def test_sleeping_rank_is_named_and_its_stack_is_saved(place: Path) -> None:
    """A rank that sleeps in Python can still answer the watchdog, so its dump shows the line that blocks.

    No launcher of vitpar's picks the line here, as under torchrun: one rank alone writes it.
    """
    (place / "held.py").write_text(HELD)
    codes, texts = zip(*exits(held, two_ranks(), place), strict=True)
    errors = "".join(texts)
    assert codes == (1, 1), errors
    said = (
        "rank 1 had not reached a collective that rank 0 had called; ranks 0 and 1 were computing step 5; stacks are in"
    )
    assert errors == f"error: the run hangs: no progress for 0.05 minutes; {said} 'held/hang'\n"
    stacks = (place / "held" / "hang" / "rank1.txt").read_text()
    assert stacks.startswith("computing step 5\n") and re.search(r'held\.py", line 7 in step', stacks), stacks


def stuck(folder: Path) -> None:
    """Hang in a world of one."""
    join(ALONE, "cpu")
    with Watchdog(0.002) as watchdog:
        watchdog.settled = True
        watchdog.folder = folder
        time.sleep(100)


def test_stacks_are_not_written_through_symlinks(tmp_path: Path) -> None:
    folder, victim = tmp_path / "hang", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("mine")
    (folder / "rank0.txt").symlink_to(victim)
    ((code, errors),) = exits(stuck, [{}], folder)
    assert (code, victim.read_text()) == (1, "mine"), errors
    assert (
        errors
        == f"error: the run hangs: no progress for 0.002 minutes; rank 0 was starting; stacks are in '{folder}'\n"
    )
    dump = folder / "rank0.txt"
    assert not dump.is_symlink() and "in stuck" in dump.read_text()


def silent(noticing: int, stopped: bool) -> None:
    """Run two ranks that lose sight of each other, which only rank `noticing` notices.

    stopped: whether the other rank stops, and with rank 0 the store; else it runs C code that holds Python's lock.
    """
    world = find_world()
    assert world is not None
    watchdog.LISTEN_S, watchdog.LOST_S = 0.1, 1.0 if world.rank == noticing else 1000.0
    join(world, "cpu")
    with Watchdog(10):
        if world.rank == noticing:
            time.sleep(100.0)
        if stopped:
            subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            ctypes.PyDLL(None).sleep(6)
    os._exit(0)


@pytest.mark.parametrize(("noticing", "stopped"), [(0, False), (1, False), (1, True)])
def test_silent_rank_is_named_with_its_host_long_before_the_run_counts_as_hung(noticing: int, stopped: bool) -> None:
    codes, texts = zip(*exits(silent, two_ranks(), noticing, stopped), strict=True)
    assert codes[noticing] == 1, texts
    named = rf"error: the run hangs: rank {1 - noticing} on {HOST} gave no sign of life for 1\S* s: its process .*\n"
    assert re.fullmatch(named, texts[noticing]), texts


def test_hang_minutes_0_starts_no_watchdog_and_may_change_on_resume(place: Path) -> None:
    with Watchdog(0) as off:
        assert not hasattr(off, "_world")
    # Fault handling does not change the result, so a resumed run may change it without --allow-change.
    before, other = (read_recipe(place / "recipe.toml", more) for more in ({}, {"faults.hang_minutes": 3}))
    assert not changes(before, other)


# the sentence


def note(calls: int, place: str = "computing step 7", group: tuple[int, ...] = (0, 1, 2, 3)) -> Note:
    return Note(1, place, "n1", {"0": (calls, group)})


def test_behind_finds_the_rank_that_blocks_the_others() -> None:
    assert behind([note(5), note(4), note(5), note(5)]) == ([1], [0, 2, 3])
    assert behind([note(5), note(5)]) == ([], [])
    # Rank 2 waits for 1 in one group and 1 for 0 in another, so rank 0 blocks all.
    calls = [{"b": (8, [0, 1])}, {"a": (3, [1, 2]), "b": (9, [0, 1])}, {"a": (4, [1, 2])}]
    assert behind([Note(1, "", "", each) for each in calls]) == ([0], [1, 2])


def test_sentence_names_ranks_and_their_phases() -> None:
    notes = [note(5) for _ in range(4)]
    assert verdict(notes, {}, 10) == "no progress for 10 minutes; ranks 0-3 were computing step 7"
    notes[2] = note(4, "waiting for the data of step 7")
    waiting = "ranks 0, 1 and 3 were computing step 7; rank 2 was waiting for the data of step 7"
    late = "rank 2 had not reached a collective that ranks 0, 1 and 3 had called"
    assert verdict(notes, {}, 10) == f"no progress for 10 minutes; {late}; {waiting}"
    notes[3] = notes[3]._replace(host="n2")
    stopped = "their processes are stopped, or the machine or its network is down"
    assert verdict(notes, {1: 120, 3: 122}, 10) == (
        f"ranks 1 and 3 on n1 and n2 gave no sign of life for 120 s: {stopped}; {waiting}"
    )
