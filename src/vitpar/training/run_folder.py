"""Folder of a run, with all records of it.

runs/<date>-<model>-<strategy>/
    recipe.toml      every setting, merged      plan.json       the plan
    env.json         versions, hardware, git commit, command, kernels, metrics
    log.txt          what happened, for people  metrics.jsonl   steps, evaluations and events, one object a line
    checkpoints/step_<n>/   all that the run needs to resume (``vitpar.checkpoint``)
    track.json       identifier of the run for trackers, and tensorboard/ and wandb/: what they write
    hang/            what each rank was doing, if the run hung (``vitpar.training.faults.watchdog``)
    weights/         the trained weights, as safetensors (``vitpar.weights.folder``)
"""

import fcntl
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from vitpar.errors import RecipeError
from vitpar.io import read_json, write_text, writing
from vitpar.recipe import Recipe
from vitpar.strategy import Plan
from vitpar.strategy.plan_json import plan_text, write_plan
from vitpar.tasks import Task
from vitpar.text import log_line

RUNS = Path("runs")
"""Parent of run folders that are not named."""


def check_run_folder(path: Path | None, resuming: bool = False) -> None:
    """Refuse a run folder that another run used or that cannot be created. Raises RecipeError.

    path: None for a new folder under `RUNS`. resuming: whether it may hold a run, but nothing else.
    """
    used = path is not None and path.exists() and (not path.is_dir() or any(path.iterdir()))
    if path is not None and used and not (resuming and (path / "log.txt").is_file()):
        resume = f", resume it with --resume {path}" if (path / "recipe.toml").is_file() else ""
        raise RecipeError(
            f"the run folder '{path}' exists and is not empty: name another one with --run-dir{resume}, or remove it"
        )
    place = (path or RUNS).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise RecipeError(
            f"the run folder '{path or RUNS}' cannot be created, since '{place}' is not a writable folder: name "
            f"another one with --run-dir"
        )


class RunFolder:
    """Writer of the files of one run. Only the rank that owns it (rank 0) has one.

    path: None for a new one under `RUNS`. resuming: whether the run began earlier.

    Raises RecipeError if the folder cannot be made, or another process writes to it.
    """

    environment: dict[str, Any]
    """Content of env.json, from `begin` on."""
    texts: dict[str, str]
    """Text of recipe.toml, plan.json and env.json by name, from `begin` on."""
    step: int
    """Step of the newest row of metrics.jsonl, from `begin` on; first that after which the run resumes, or 0."""
    logged = 0
    """Last step in metrics.jsonl when the run began to write; the run may repeat some of those steps."""

    def __init__(self, path: Path | None, recipe: Recipe, plan: Plan, *, resuming: bool = False) -> None:
        check_run_folder(path, resuming)
        self._resuming = resuming
        self._metrics: TextIO | None = None
        self._early: list[tuple[str, dict[str, Any]]] = []
        try:
            model = Path(recipe.model.name).name  # of a file of one's own
            # A layerwise plan would be long and full of shell metacharacters.
            short = str(plan) if plan.is_uniform else f"pp{plan.pp}-layerwise"
            self.path = path or _fresh(RUNS, f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{short}")
            self.path.mkdir(parents=True, exist_ok=True)
            self._log = (self.path / "log.txt").open("a")
        except OSError as error:
            raise RecipeError(
                f"the run folder '{path or RUNS}' cannot be created: {error.strerror}: name another one with --run-dir"
            ) from None
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(f"the run in '{self.path}' is still running: wait for it, or stop it") from None
        except OSError:  # a mount without locks
            pass

    def begin(
        self,
        recipe: Recipe,
        plan: Plan,
        task: Task,
        command: Sequence[str],
        after: int,
        kernels: Mapping[str, Any],
        start: Mapping[str, Any],
    ) -> None:
        """Write the recipe, the plan and the environment, open metrics.jsonl, and write the event of the start.

        task: whose metrics are described in env.json, for those who read the run.
        after: step after which the run resumes, 0 for a new run. Later rows of metrics.jsonl are dropped, since the run
        repeats those steps.
        kernels: kernels that the run computes with, for env.json.
        start: facts about the start (``vitpar.runs.metrics.RunStart``).
        """
        described = {"metrics": [asdict(metric) for metric in task.METRICS]}
        commands = list[Any]()  # that began and resumed the run, with the step before each
        with suppress(OSError, ValueError, KeyError, TypeError):
            before = read_json(self.path / "env.json")["commands"]
            commands = [[step, words] for step, words in before if step < after]
        commands.append([after, list(command)])
        self.environment = {**_environment(command), "commands": commands, **kernels, **described}
        self.texts = {
            "recipe.toml": recipe.to_toml(),
            "plan.json": plan_text(plan),
            "env.json": json.dumps(self.environment, indent=1),
        }
        write_text(self.path / "recipe.toml", self.texts["recipe.toml"])
        write_plan(self.path / "plan.json", plan)
        write_text(self.path / "env.json", self.texts["env.json"])
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            lines = list(_lines(metrics))
            self.logged = max((step for step, _ in lines), default=0)
            write_text(metrics, "".join(line for step, line in lines if step <= after))
        self._metrics = metrics.open("a")
        self.step, self._start = after, dict(start)
        self.event("start", **start)
        for event, fields in self._early:
            self.event(event, **fields)

    def restore(self) -> str | None:
        """Write the files of the run again if its folder was removed or moved, and return a warning; else None.

        The run continues: it would lose more by stopping than it lost with its files.

        Raises RecipeError if the folder cannot be written.
        """
        assert self._metrics is not None, "the run has begun"
        try:
            if os.path.samestat(os.fstat(self._metrics.fileno()), os.stat(self.path / "metrics.jsonl")):
                return None
        except FileNotFoundError:
            pass
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            log, metrics = ((self.path / name).open("a") for name in ("log.txt", "metrics.jsonl"))
            with suppress(OSError):  # a mount without locks
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name, text in self.texts.items():
                write_text(self.path / name, text)
        except OSError as error:
            raise RecipeError(
                f"the run folder '{self.path}' was removed during the run and cannot be created again: "
                f"{error.strerror}: name another one with --run-dir"
            ) from None
        self.close()
        self._log, self._metrics = log, metrics
        self.event("start", **self._start)
        return (
            f"the run folder '{self.path}' or its metrics.jsonl was removed or moved during the run, and is written "
            "again from here; earlier checkpoints may be gone"
        )

    def discard(self) -> None:
        """Let go of the folder of a run that did not begin, and remove it unless the run began earlier."""
        self._log.close()
        if not self._resuming:
            shutil.rmtree(self.path)

    def metric(self, row: dict[str, Any]) -> None:
        """Append one object to metrics.jsonl, with the time."""
        assert self._metrics is not None, "the run has begun"
        time_of_row = datetime.now(UTC).isoformat(timespec="seconds")
        with writing(self._metrics.name):
            self._metrics.write(json.dumps({**row, "time": time_of_row}, allow_nan=False) + "\n")
            self._metrics.flush()

    def event(self, event: str, **fields: Any) -> None:
        """Append an event to metrics.jsonl, for pages and lists of runs; those before `begin` follow the start.

        event: start, save, warning, stopped, error or done.
        fields: facts about it; `text` is for people. The step is the last one in metrics.jsonl unless it is given.
        """
        if self._metrics is None:
            self._early.append((event, fields))
        else:
            self.metric({"kind": "event", "event": event, "step": self.step, **fields})

    def trained(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append the rows of steps to metrics.jsonl, and a line for each skipped one to log.txt."""
        from vitpar.training.faults.non_finite import skip_words

        for row in rows:
            self.metric(row)
            self.step = row["step"]
            if row.get("skipped"):
                self.log(skip_words(row))

    def log(self, text: str) -> None:
        """Append a line to log.txt, with date and local time."""
        with writing(self._log.name):
            self._log.write(log_line(text))
            self._log.flush()

    def close(self) -> None:
        """Close the files."""
        if self._metrics is not None:
            self._metrics.close()
        self._log.close()


def _lines(metrics: Path) -> Iterator[tuple[int, str]]:
    """Yield step and text of the lines of `metrics`. A line that a killed run left incomplete is no JSON."""
    for line in metrics.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            step = json.loads(line)["step"]
            if isinstance(step, int):
                yield step, f"{line}\n"


def _fresh(parent: Path, name: str) -> Path:
    """Create the folder ``parent/name``, with a number appended if that exists."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("there is no last number")


def _environment(command: Sequence[str]) -> dict[str, Any]:
    """Return versions, hardware, git commit and command."""
    import torch

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # no git on this machine
        commit = None
    return {
        "command": list(command),
        "git_commit": commit,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
