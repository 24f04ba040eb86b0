"""Runs that a random fault hits at a random place resume correctly, again and again: `make soak`."""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers import injected_faults
from helpers.command_line import started
from helpers.injected_faults import FAULTS, HANGS, OF_RANK_0, OF_SAVES, TOLD
from helpers.killed_runs import alive, rows
from helpers.shared_runs import shared_run
from vitpar.checkpoint.folder import Checkpoint, Checkpoints
from vitpar.errors import CheckpointError

DEPTH, STEPS = 4, 40
PLANS = {"dp1": 1, "dp2": 2, "fsdp2": 2, "tp2": 2, "pp2": 2, "dp2+zero1": 2, "pp2xtp2": 4}
"""Ranks by plan."""
OPTIONS = ("checkpoint.every=3", "checkpoint.keep=3", "faults.hang_minutes=1")
DAMAGE = ("newest checkpoint cut", "newest checkpoint with one bit flipped", "newest index cut")
KINDS = [*FAULTS, *DAMAGE]
STANDS_STILL = 240.0
"""Seconds after which a run that has not ended is killed."""
ENDS_WITHIN = 30.0
"""Seconds that a run may take to end after a fault. Ranks notice a request to end within 5 s."""


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("task", ["classify", "mae", "mlm"])
def test_run_survives_28_random_faults(
    task: str, seed: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A run that is finished starts again from step 0."""
    place, draw = tmp_path / "place", random.Random(seed)
    shutil.copytree(shared_run(f"uninterrupted {task}", tmp_path_factory), place)
    (place / "run").rename(place / "through")
    kinds, spoiled = draw.sample(KINDS, len(KINDS)), set[int]()
    for number in range(28):
        kind = kinds[number % len(kinds)]
        mesh = draw.choice(list(PLANS))
        finished = cycle(place, draw, kind, mesh, spoiled)
        if finished:
            shutil.rmtree(place / "run")
            spoiled.clear()


def cycle(place: Path, draw: random.Random, kind: str, mesh: str, spoiled: set[int]) -> bool:
    """Resume the run under `mesh` until a fault of `kind` hits a rank; return whether the run ended before.

    spoiled: steps of damaged checkpoints
    """
    run, fired, ranks = place / "run", place / "fired", PLANS[mesh]
    there = Checkpoints(run / "checkpoints")
    if kind in DAMAGE and len(there.steps()) > 1:
        spoiled.add(damage(kind, there, draw))
    newest = max((step for step in there.steps() if step not in spoiled), default=0)
    if kind in HANGS and ranks == 1:  # no rank waits for it
        mesh, ranks = "dp2", 2
    rank = 0 if kind in OF_RANK_0 else draw.randrange(ranks)
    count = draw.randrange(1, 4 if kind in (*OF_SAVES, "SIGUSR1 in an evaluation") else 12)
    if "forward" in kind or "backward" in kind:
        count *= draw.randrange(1, DEPTH + 1)
    fault = "killed anywhere" if kind in DAMAGE else kind
    said = f"{kind}, {mesh}, rank {rank}, {count}"
    fired.unlink(missing_ok=True)
    settings = [word for option in OPTIONS for word in ("--set", option)]
    words = ["train", "--mesh", mesh, "--recipe", "recipe.toml", "--run-dir", "run", "--resume", "auto", *settings]
    process = started(place, words, [injected_faults.__file__, fault, str(rank), str(count), str(fired)])
    out, ended, code = communicate(process)
    log = (run / "log.txt").read_text() if (run / "log.txt").exists() else ""
    if not fired.exists():
        assert code == 0, f"{said}: {out}"
    elif code or f"step_{STEPS}" not in out + log:  # else the fault came after the last step, and the run succeeded
        killed, hangs = "killed" in fault, fault in HANGS
        asked = ("SIG" in fault or fault == "Ctrl-C") and not hangs
        of_launcher = fault == "launcher killed" or (ranks == 1 and killed)
        assert code == (75 if asked else 2 if fault in TOLD else -9 if of_launcher else 1), f"{said}: {out}"
        sentence = "cannot be written" if fault in TOLD else "was killed by SIGKILL" if code == 1 and killed else ""
        # A rank that sleeps still answers: it has not called what the others wait for.
        sentence = {"SIGSTOP": f"the run hangs: rank {rank} on ", "asleep": "the run hangs: no pro"}.get(
            fault, sentence
        )
        assert sentence in " ".join(out.split()), f"{said}: {out}"
        limit = ENDS_WITHIN + hangs * (120 if fault == "SIGSTOP" and rank == 0 else 60)
        assert ended - fired.stat().st_mtime < limit, said
    time.sleep(0.5)  # for ranks that have just noticed the end of the launcher
    assert not left(place), said
    for step in there.steps():
        problem = damaged(there.path(step))
        assert problem is None or step in spoiled, f"{said}: step_{step}: {problem}"
        spoiled -= {step} if problem is None else set()  # it was written again
    assert max(there.steps(), default=0) >= newest, f"{said}: step_{newest} is lost"
    resumed = [int(step) for step in re.findall(r"resuming from .*step_(\d+):", log)]
    # A later step is fine: a complete checkpoint that was only not renamed yet is used too.
    assert not newest or (resumed and resumed[-1] >= newest and resumed[-1] not in spoiled), said
    expected = rows(place / "through")
    for key, row in rows(run).items() if (run / "metrics.jsonl").exists() else ():
        assert row["loss"] == pytest.approx(expected[key]["loss"], rel=1e-4), f"{said}: {key}"
    return code == 0


def communicate(process: "subprocess.Popen[str]") -> tuple[str, float, int]:
    """Wait for the end of a process, and return its output, the time of its end, and its exit code."""
    try:
        texts = process.communicate(timeout=STANDS_STILL)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        texts = process.communicate()
    return "".join(texts), time.time(), process.returncode


def damage(kind: str, there: Checkpoints, draw: random.Random) -> int:
    """Damage the newest checkpoint and return its step."""
    newest = there.path(there.steps()[-1])
    path = newest / "index.json" if "index" in kind else draw.choice(sorted(newest.glob("shard-*")))
    content = bytearray(path.read_bytes())
    if "flipped" in kind:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    else:
        del content[draw.randrange(len(content)) :]
    path.write_bytes(content)
    return there.steps()[-1]


def damaged(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint."""
    try:
        return Checkpoint.open(checkpoint).damage()
    except CheckpointError as error:
        return str(error)


def left(place: Path) -> list[int]:
    """Return the processes that still run in the folder `place`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            found += [int(path.name)] * (path.joinpath("cwd").resolve() == place.resolve())
        except OSError:
            continue
    return alive(found)
