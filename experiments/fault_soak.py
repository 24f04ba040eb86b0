"""Inject random faults into training runs and check that each run resumes correctly.

    python experiments/fault_soak.py --cycles 200        # about an hour on two cores

Each cycle resumes a small run of the digits recipe from its last checkpoint under a random plan. A random fault hits a
rank at a random place in the program (`faults/injected.py`), or the newest checkpoint is damaged first. A cycle counts
as survived if all of these hold:

- the run ended by itself, in time and with the right message and exit code;
- none of its processes is left;
- every checkpoint folder is complete, and none was lost;
- it resumed from the newest intact checkpoint;
- all losses equal those of an uninterrupted run (1e-9, fp64).

Prints a row for each kind of fault. A run that is finished, or failed a check, starts again from step 0. Exit code 1: a
cycle was not survived.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import Report, parser
from faults.injected import FAULTS, OF_RANK_0, OF_SAVES, TOLD
from vitpar.checkpoint import Checkpoint, Checkpoints
from vitpar.errors import CheckpointError

HERE = Path(__file__).parent
STEPS, EVERY = 60, 3
MODEL = {"embed_dim": 24, "depth": 4, "num_heads": 4, "drop_path": 0.1, "dropout": 0.1, "init": "moco"}
TRAIN = {"steps": STEPS, "batch_size": 16, "log_every": 1, "eval_every": 20, "ema_decay": 0.9, "precision": "fp64"}
SETTINGS = [
    *(f"model.{key}={value}" for key, value in MODEL.items()),
    *(f"train.{key}={value}" for key, value in TRAIN.items()),
    *(f"checkpoint.every_steps={EVERY}", "checkpoint.keep=3", "augment.mixup=0.8", "faults.hang_minutes=1"),
]
PLANS = {"dp1": 1, "dp2": 2, "fsdp2": 2, "tp2": 2, "pp2": 2, "dp2+zero1": 2, "pp2xtp2": 4}
DAMAGE = ("newest checkpoint cut", "newest checkpoint with one bit flipped", "newest index cut")
STANDS_STILL = 240.0
"""Seconds after which a run that has not ended is killed."""
ENDS_WITHIN = 30.0
"""Seconds that a run may take to end after a fault. Ranks notice a request to end within 5 s."""


class Soak:
    """Cycles of faults in the folder `place`.

    draw: generator of plans, faults and places.
    """

    def __init__(self, place: Path, draw: random.Random) -> None:
        self._place, self._draw = place, draw
        self._run, self._fired = place / "run", place / "fired"
        self._spoiled: set[int | None] = set()
        vitpar(place, ["data", "pack", "digits", "data"])
        vitpar(place, ["train", "--mesh", "dp1", "--run-dir", "through", *options()])
        self._expected = rows(place / "through")

    def cycle(self, kind: str) -> tuple[str, list[str], float | None]:
        """Run one cycle with a fault of `kind`.

        Returns a description, the failed checks, and the seconds from fault to end (None if the fault did not occur).
        """
        mesh = self._draw.choice(list(PLANS))
        there = Checkpoints(self._run / "checkpoints")
        damaged = self._damage(kind, there) if kind in DAMAGE else None
        self._spoiled |= {damaged} - {None}
        before = [step for step in there.steps() if step not in self._spoiled]
        ranks = PLANS[mesh]
        rank = 0 if kind in OF_RANK_0 else self._draw.randrange(ranks)
        count = self._draw.randrange(1, 4 if kind in OF_SAVES else 12)
        if "forward" in kind or "backward" in kind:
            count *= self._draw.randrange(1, MODEL["depth"] + 1)
        fault = "killed anywhere" if kind in DAMAGE else kind
        self._fired.unlink(missing_ok=True)
        words = ["train", "--mesh", mesh, "--run-dir", "run", "--resume", "auto", *options()]
        process = started(
            self._place, [str(HERE / "faults" / "injected.py"), fault, str(rank), str(count), "fired", *words]
        )
        try:
            out, _ = process.communicate(timeout=STANDS_STILL)
            ended = time.time()
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            out, ended = self._log()[-1000:], time.time()
        fired = self._fired.stat().st_mtime if self._fired.exists() else None
        came = fired is not None if kind not in DAMAGE else damaged is not None
        said = f"{kind}, {mesh}, rank {rank}, {count}"
        wrong = self._wrong(fault, process.returncode, out, fired, ended, ranks)
        wrong += self._left(there, before)
        if process.returncode == 0 or wrong:
            shutil.rmtree(self._run, ignore_errors=True)
            self._spoiled = set()
        return said, wrong, ended - fired if came and fired is not None else None

    def _damage(self, kind: str, there: Checkpoints) -> int | None:
        """Damage the newest checkpoint and return its step; do nothing and return None if there is no older one."""
        steps = there.steps()
        if len(steps) < 2:
            return None
        newest = there.path(steps[-1])
        path = newest / "index.json" if "index" in kind else self._draw.choice(sorted(newest.glob("shard-*")))
        content = bytearray(path.read_bytes())
        if "flipped" in kind:
            content[self._draw.randrange(len(content))] ^= 1 << self._draw.randrange(8)
        else:
            del content[self._draw.randrange(len(content)) :]
        path.write_bytes(content)
        return steps[-1]

    def _wrong(
        self, fault: str, code: int | None, out: str, fired: float | None, ended: float, ranks: int
    ) -> list[str]:
        """Return what is wrong with the end of the run: exit code, message, duration."""
        if fired is None:
            return [] if code == 0 else [f"it ended with {code} before the fault:\n{out[-2000:]}"]
        asked = "SIG" in fault or fault == "Ctrl-C"
        told = fault in TOLD
        codes = [75] if asked else [2] if told else [-9] if ranks == 1 and "killed" in fault else [1]
        done = f"step_{STEPS}"  # the fault came after the last step, so the run may have succeeded
        wrong = (
            [] if code in codes or (code == 0 and done in out + self._log()) else [f"exit code {code}:\n{out[-2000:]}"]
        )
        words = "cannot be written" if told else "was killed by SIGKILL" if codes == [1] and "killed" in fault else ""
        wrong += [f"it does not say {words!r}:\n{out[-2000:]}"] * (code != 0 and words not in " ".join(out.split()))
        wrong += [f"it took {ended - fired:.0f} s to end"] * (ended - fired > ENDS_WITHIN)
        return wrong

    def _log(self) -> str:
        path = self._run / "log.txt"
        return path.read_text() if path.exists() else ""

    def _left(self, there: Checkpoints, before: list[int]) -> list[str]:
        """Return what is wrong after the run: processes, checkpoints, place of resuming, losses."""
        time.sleep(0.5)  # for ranks that have just noticed the end of the launcher
        wrong = []
        for pid in processes(self._place):
            wrong.append(f"process {pid} is left")
            os.kill(pid, signal.SIGKILL)
        for step in there.steps():
            try:
                damage = Checkpoint.open(there.path(step)).damage()
            except CheckpointError as error:
                damage = str(error)
            if step in self._spoiled:
                self._spoiled -= {step} if damage is None else set()  # it was written again
                continue
            wrong += [f"step_{step} is not whole: {damage}"] * (damage is not None)
        newest = max(before, default=0)
        if newest and max(there.steps(), default=0) < newest:
            wrong.append(f"step_{newest} is lost")
        resumed = [int(step) for step in re.findall(r"resuming from .*step_(\d+):", self._log())]
        # A later step is fine: a complete checkpoint that was only not renamed yet is used too.
        if newest and (not resumed or resumed[-1] < newest or resumed[-1] in self._spoiled):
            wrong.append(f"it did not resume from step_{newest}, but from {resumed[-1:]}")
        for key, row in rows(self._run).items():
            if abs(row["loss"] / self._expected[key]["loss"] - 1) > 1e-9:
                wrong.append(f"the loss of {key} is {row['loss']}, not {self._expected[key]['loss']}")
        return wrong


def options() -> list[str]:
    """Return the options of every run."""
    recipe = ["--recipe", str(HERE / "digits.toml"), "--data", "data", "--device", "cpu"]
    return recipe + [word for setting in SETTINGS for word in ("--set", setting)]


def rows(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of metrics.jsonl by (kind, step), without a last line that is incomplete."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {(row["kind"], row["step"]): row for row in found}


def started(place: Path, argv: list[str]) -> subprocess.Popen[str]:
    """Start Python in the folder `place`, in a new session."""
    own = {"OMP_NUM_THREADS": "1", "VITPAR_SOAK": str(place)}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [sys.executable, *argv], cwd=place, env={**os.environ, **own}, start_new_session=True, **pipe
    )


def vitpar(place: Path, words: list[str]) -> None:
    """Run a vitpar command; exit with its output if it fails."""
    process = started(place, ["-m", "vitpar_cli.main", *words])
    out, _ = process.communicate()
    if process.returncode:
        sys.exit(out)


def processes(place: Path) -> list[int]:
    """Return the running processes that were started for `place`, except zombies."""
    mark, found = f"VITPAR_SOAK={place}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found += [int(path.name)] * ((path / "stat").read_text().rpartition(")")[2].split()[0] != "Z")
        except OSError:
            continue
    return found


def main() -> int:
    """Read the options, run the cycles, print the table; return 1 if a cycle was not survived."""
    made = parser(__doc__, [*FAULTS, *DAMAGE])
    made.add_argument("--cycles", type=int, default=200)
    made.add_argument("--seed", type=int, default=0, help="of plans, faults and places")
    given = made.parse_args()
    report, kinds, draw = Report(given.json), given.only or [*FAULTS, *DAMAGE], random.Random(given.seed)
    cycles: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), draw)
        for number in range(given.cycles):
            kind = kinds[number % len(kinds)] if number < len(kinds) else draw.choice(kinds)
            said, wrong, seconds = soak.cycle(kind)
            cycles.append({"kind": kind, "said": said, "wrong": wrong, "seconds": seconds})
            report.keep("cycles", cycles)
            print(f"{number + 1:3} {said}: {'; '.join(wrong) or 'survived'}", file=sys.stderr, flush=True)
    cells = []
    for kind in sorted({one["kind"] for one in cycles}):
        mine = [one for one in cycles if one["kind"] == kind]
        passed = [one["seconds"] for one in mine if one["seconds"] is not None]
        survived = sum(not one["wrong"] for one in mine)
        cells.append([kind, f"{len(mine)}", f"{len(passed)}", f"{survived}", f"{max(passed, default=0):.1f}"])
    heads = ("fault", "cycles", "came to pass", "survived", "seconds from fault to end, at most")
    report.show("faults", heads, cells, cycles)
    return int(any(one["wrong"] for one in cycles))


if __name__ == "__main__":
    sys.exit(main())
