"""Hung runs: each responsive rank notices, the run ends with one error line, and each rank dumps its stacks to disk."""

import ctypes
import os
import platform
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.command_line import started
from helpers.killed_runs import alive, lines, ranks_of, wait_for
from helpers.ranks import exits, two_ranks
from helpers.trained import recipe_text
from vitpar.launch import ALONE, find_world, join
from vitpar.training.faults import watchdog
from vitpar.training.faults.hang import Answer, behind, lost_sentence, sentence
from vitpar.training.faults.watchdog import COMPUTING, WAITING, Watchdog
from vitpar.training.recipe import read_recipe
from vitpar.training.saving.resume import changes

RECIPE = recipe_text(
    **{"data.path": "data", "data.workers": 0, "train.steps": 100_000, "train.batch_size": 8, "train.log_every": 1},
    **{"model.depth": 2, "checkpoint.every": 0, "faults.hang_minutes": 0.05},
)


@contextmanager
def training(
    place: Path, name: str, mesh: str, launcher: tuple[str, ...] = ()
) -> Iterator["tuple[subprocess.Popen[str], list[int]]"]:
    """Start a run, wait until it trains, and yield its process and the process ids of its ranks."""
    words = ["--recipe", "recipe.toml", "--mesh", mesh, "--run-dir", name, "--set", "train.eval_every=100000"]
    process = started(place, ["train", *words], launcher)
    try:
        wait_for(lambda: lines(place / name) > 3, process)
        yield process, ranks_of(process.pid)
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp2", "pp2xdp2"])
def test_rank_stopped_by_sigstop_ends_the_run_with_one_error_line(mesh: str, place: Path) -> None:
    """A stopped rank cannot answer the watchdog, so the other ranks must notice and name it."""
    name = f"stopped-{mesh}"
    with training(place, name, mesh) as (process, ranks):
        os.kill(
            next(pid for pid in ranks if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()), signal.SIGSTOP
        )
        begun = time.monotonic()
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1
        assert errors.startswith("error: the run hangs: no progress for 0.05 minutes; rank 1 did not respond, ")
        assert errors.count("\n") == 1 and errors.endswith(f"stacks are in '{name}/hang'\n"), errors
        assert "computing step" in errors
        assert time.monotonic() - begun < 60
        wait_for(lambda: not alive(ranks), process, ended=True)
    dumps = {path.name: path.read_text() for path in (place / name / "hang").iterdir()}
    assert dumps.keys() == {f"rank{rank}.txt" for rank in range(len(ranks)) if rank != 1}
    # A rank waits in one of the step's collectives: activations or gradients, their norm, or the logged losses.
    waits = ("forward_backward", "total_norm", "flush")
    for text in dumps.values():
        assert "thread MainThread:" in text and any(name in text for name in waits), text
    assert "error: the run hangs" in (place / name / "log.txt").read_text()


@pytest.mark.slow
def test_under_torchrun_one_rank_reports_the_hang(place: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with training(place, "torchrun", "dp2", launcher) as (process, ranks):
        os.kill(max(ranks), signal.SIGSTOP)
        _, errors = process.communicate(timeout=150)
        assert process.returncode != 0
        assert errors.count("error: the run hangs: ") == 1 and "rank 1 did not respond" in errors, errors
        assert "gloo" not in errors
        wait_for(lambda: not alive(ranks), process, ended=True)


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
    """A rank that sleeps in Python can still answer the watchdog, so its dump shows the line that blocks."""
    (place / "held.py").write_text(HELD)
    codes, texts = zip(*exits(held, two_ranks(), place), strict=True)
    errors = "".join(texts)
    assert codes == (1, 1), errors
    said = "rank 1 had not reached a collective that rank 0 had called, ranks 0 and 1 were computing step 5"
    assert errors.startswith("error: the run hangs: ") and said in errors and errors.count("\n") == 1
    assert "time.sleep(1000)" in (place / "held" / "hang" / "rank1.txt").read_text()


def stuck(folder: Path, known: bool) -> None:
    """Hang in a world of one."""
    tempfile.tempdir = str(folder)
    join(ALONE, "cpu")
    with Watchdog(0.002) as watchdog:
        watchdog.settled = True
        watchdog.folder = folder / "hang" if known else None
        time.sleep(100)


@pytest.mark.parametrize("known", [True, False])
def test_stacks_are_not_written_through_symlinks(known: bool, tmp_path: Path) -> None:
    """A planted symlink is not followed.

    The fallback folder in /tmp has a random name, so it cannot be created in advance.
    """
    folder, victim = tmp_path / ("hang" if known else "vitpar-hang"), tmp_path / "victim"
    folder.mkdir()
    victim.write_text("mine")
    (folder / "rank0.txt").symlink_to(victim)
    ((code, errors),) = exits(stuck, [{}], tmp_path, known)
    assert code == 1, errors
    found = re.search(r"; stacks are in '(.+)'\n$", errors)
    assert found and victim.read_text() == "mine", errors
    dump = Path(found[1]) / "rank0.txt"
    assert dump.is_file() and not dump.is_symlink() and "thread MainThread:" in dump.read_text()
    if known:
        assert dump.parent == folder
    else:
        assert dump.parent.name.startswith("vitpar-hang-") and dump.parent.stat().st_mode & 0o777 == 0o700


def silent(noticing: int) -> None:
    """Run two ranks that lose sight of each other, which only rank `noticing` notices.

    Rank 1 runs C code that holds Python's lock, for rank 0; its polls do not return, as behind a cut link, for itself.
    """
    world = find_world()
    assert world is not None
    watchdog.LISTEN_S, watchdog.LOST_S = 0.1, 0.5 if world.rank == noticing else 1000.0
    join(world, "cpu")
    if noticing == 1 == world.rank:
        Watchdog._listen = lambda dog, store: None  # type: ignore[method-assign]
    with Watchdog(10):
        ctypes.PyDLL(None).sleep(3) if world.rank > noticing else time.sleep(100.0)
    os._exit(0)


@pytest.mark.parametrize(("noticing", "host"), [(0, platform.node()), (1, "127.0.0.1")])
def test_silent_rank_is_named_with_its_host_long_before_the_run_counts_as_hung(noticing: int, host: str) -> None:
    codes, texts = zip(*exits(silent, two_ranks(), noticing), strict=True)
    assert codes[noticing] == 1, texts
    named = f"error: rank {1 - noticing} on {host} was silent towards rank {noticing} for 0.5 s: its process is "
    assert texts[noticing].startswith(named) and texts[noticing].count("\n") == 1, texts


def test_hang_minutes_0_starts_no_watchdog_and_may_change_on_resume(place: Path) -> None:
    with Watchdog(0) as off:
        assert not hasattr(off, "_world")
    # Fault handling does not change the result, so a resumed run may change it without --allow-change.
    before, other = (read_recipe(place / "recipe.toml", more) for more in ({}, {"faults.hang_minutes": 3}))
    assert not changes(before, other)


# analysis of the ranks' answers


def answer(
    rank: int, number: int, phase: str = COMPUTING, step: int = 7, group: tuple[int, ...] = (0, 1, 2, 3)
) -> Answer:
    return Answer(rank, phase, step, {"0": (number, list(group))}, folder="run/hang")


def test_behind_finds_the_rank_that_blocks_the_others() -> None:
    assert behind([answer(0, 5), answer(1, 4), answer(2, 5), answer(3, 5)]) == ([1], [0, 2, 3])
    assert behind([answer(0, 5), answer(1, 5)]) == ([], [])
    # Rank 3 waits for 2 in one group and 2 for 0 in another, so rank 0 blocks all.
    two = Answer(2, COMPUTING, 7, {"a": (3, [2, 3]), "b": (9, [0, 2])})
    three = Answer(3, COMPUTING, 7, {"a": (4, [2, 3])})
    none = Answer(0, COMPUTING, 7, {"b": (8, [0, 2])})
    assert behind([none, two, three]) == ([0], [2, 3])


def test_hang_message_lists_ranks_phases_and_stack_folders() -> None:
    answers = {rank: answer(rank, 5) for rank in range(4)}
    assert lost_sentence({1: "n2", 2: "n3", 3: "n3"}, 0, 120).startswith(
        "ranks 1-3 on n2 and n3 were silent towards rank 0"
    )
    said = sentence(answers, 4, 10)
    assert "10 minutes; ranks 0-3 were computing step 7, which one blocks the others is unknown; " in said
    assert said.endswith("; stacks are in 'run/hang'")
    answers[2] = answer(2, 4, WAITING)
    said = sentence(answers, 4, 10)
    assert (
        "rank 2 had not reached a collective that ranks 0, 1 and 3 had called, ranks 0, 1 and 3 were computing" in said
    )
    assert "rank 2 was waiting for the data of step 7" in said
    for rank in range(4):
        answers[rank] = replace(answers[rank], folder=f"/tmp/{rank}")
    assert sentence(answers, 4, 10).endswith("; stacks are in '/tmp/0' and '/tmp/1' and '/tmp/2' and '/tmp/3'")
    answers[4] = replace(answers[3], rank=4, folder="/tmp/4")
    assert sentence(answers, 5, 10).endswith(" and '/tmp/3' and 1 more")
    del answers[2], answers[0], answers[4]
    assert "; ranks 0 and 2 did not respond, ranks 1 and 3 were computing step 7; stacks" in sentence(answers, 4, 10)
    assert Answer.read(answers[1].text()).place == "computing step 7"
