"""Experiment trackers (TensorBoard, W&B, trackio), each on a daemon thread for which a run does not wait."""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from threading import Thread, enumerate
from types import ModuleType
from typing import Any

from vitpar.text import printable, shown

FLUSH_S = 5
"""Seconds after which TensorBoard's file has what was logged."""
CAPACITY = 2_000
"""Rows that wait for a tracker at most."""
CALL_S = 30.0
"""Seconds after which a call of a tracker is given up, and the tracker with it."""
_THREADS = "vitpar-track"
"""Begin of the names of the threads."""


@dataclass(frozen=True)
class TrackedRun:
    """Facts about a run that trackers log before the first step."""

    folder: str
    """Absolute path of the run's folder."""
    id: str
    """Identifier of the run for trackers that need one; a resumed run keeps it."""
    name: str
    """Name of the run."""
    project: str
    """Project that the run belongs to, where a tracker has projects."""
    online: bool
    """Whether W&B sends to its server."""
    done: int
    """Step after which this process starts; 0 for a new run."""
    tracked: int
    """Last step that an earlier process of this run has passed to this tracker; 0 if none has."""
    resumed: bool
    """Whether an earlier process of this run has used this tracker."""
    recipe: Mapping[str, Mapping[str, Any]]
    """Settings of the recipe, by section and name."""
    facts: Mapping[str, Any]
    """Model, data, plan and hardware."""
    texts: Mapping[str, str]
    """Files of the run by name, for trackers that show text."""

    @property
    def hyper_parameters(self) -> dict[str, str | bool | int | float]:
        """Settings of the recipe by dotted key. Lists become text, and settings that are not set are left out."""
        flat = {f"{section}.{key}": value for section, values in self.recipe.items() for key, value in values.items()}
        return {
            key: value if isinstance(value, str | bool | int | float) else str(value)
            for key, value in flat.items()
            if value is not None
        }


class TensorBoardWriter:
    """Writer of event files to the folder `tensorboard` of the run.

    A resumed run writes a further file. It makes readers drop the steps that the run repeats.
    """

    def __init__(self, run: TrackedRun) -> None:
        # Or tensorboard imports TensorFlow where it is installed, for seconds.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from torch.utils.tensorboard import SummaryWriter

        folder, start = Path(run.folder, "tensorboard"), run.done + 1 if run.resumed else None
        self._writer = SummaryWriter(folder, purge_step=start, flush_secs=FLUSH_S)
        if not run.resumed:
            # SummaryWriter.add_hparams would make a folder for them, and write booleans as numbers.
            self._writer._get_file_writer().add_summary(hparams_pb(run.hyper_parameters, trial_id=run.id))
        for name, text in run.texts.items():
            self._writer.add_text(name, f"```\n{text}\n```", run.done)

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, time)

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandbWriter:
    """Writer to W&B: to the folder `wandb` of the run and, if the recipe says online, to its server.

    Steps that an earlier process has logged are left out, since W&B cannot replace them.
    """

    def __init__(self, run: TrackedRun) -> None:
        if not run.online:
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # or errors of wandb itself are sent to its authors
        os.environ["WANDB_SILENT"] = "true"
        import wandb

        self._wandb, self._tracked = wandb, run.tracked
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            dir=run.folder,
            config={"recipe": run.recipe, **run.facts},
            mode="online" if run.online else "offline",
            resume="allow" if run.resumed and run.online else None,
            save_code=False,
            settings=wandb.Settings(console="off"),
        )

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        if step > self._tracked:
            self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
        self._wandb.teardown()  # its process may still write the file of an offline run when `finish` returns


class TrackioWriter:
    """Writer to trackio's database on this machine.

    Steps that an earlier process has logged are left out, since trackio cannot replace them.
    """

    def __init__(self, run: TrackedRun) -> None:
        for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL"):
            os.environ.pop(variable, None)  # with these trackio sends to a server
        import trackio

        # trackio prints between the lines of the run, or of its JSON, and has no setting for that.
        # contextlib.redirect_stdout would also take what other threads print meanwhile.
        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "trackio"]:
            vars(module)["print"] = lambda *words, **settings: None
        self._trackio, self._tracked = trackio, run.tracked
        trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id}",  # trackio finds a run by its name
            config={"recipe": run.recipe, **run.facts},
            resume="allow" if run.resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        if step > self._tracked:
            self._trackio.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._trackio.finish()


WRITERS: dict[str, type[TensorBoardWriter | WandbWriter | TrackioWriter]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "trackio": TrackioWriter,
}
"""Writer of each tracker, which begins or continues a run. `log` gets numbers by name, with a step that never falls and
its time in seconds since the epoch; `close` writes what is left, and ends the run."""


def are_hanging() -> bool:
    """Return whether a call of a tracker has not returned, so that an exit handler of its library may not either."""
    return any(thread.name.startswith(_THREADS) for thread in enumerate())


class Tracker:
    """Tracker of a run. Its thread is a daemon, since a call that never returns must not keep the program alive.

    A tracker that fails, or that cannot keep up, is given up with one warning.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name = name
        self._rows = Queue[tuple[int, float, Mapping[str, float]] | None](CAPACITY)
        self._begun: float | None = time.monotonic()
        self._failed, self._problem, self._told = False, "", False
        self._thread = Thread(target=self._write, args=(run,), name=f"{_THREADS}-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers of a step. Never waits."""
        begun = self._begun
        if begun is not None and time.monotonic() - begun > CALL_S:
            self._give_up(f"a call did not return in {CALL_S:g} s")
        try:
            self._rows.put_nowait((step, time.time(), values))
        except Full:
            self._give_up(f"it is too slow: {CAPACITY:,} rows wait for it")

    def close(self, failed: bool) -> None:
        """Announce the end of the run, which comes after all rows. failed: whether the run failed."""
        self._failed = failed
        with suppress(Full):  # then the tracker is given up
            self._rows.put_nowait(None)

    def join(self, deadline: float) -> None:
        """Wait until the tracker has written everything, at most until `deadline` of ``time.monotonic``."""
        if not self._problem:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._give_up("it did not finish in time, so its last values may be missing")

    def problem(self) -> str | None:
        """Return a warning about the tracker, once; None if there is nothing new."""
        if self._told or not self._problem:
            return None
        self._told = True
        return f"the tracker {self.name} failed, and the run continues without it: {self._problem}"

    def _give_up(self, problem: str) -> None:
        self._problem = self._problem or problem

    def _write(self, run: TrackedRun) -> None:
        """Make the writer, and write all rows until the run ends. Runs in the thread."""
        try:
            writer = WRITERS[self.name](run)
            self._begun = None
            while (row := self._rows.get()) is not None and not self._problem:
                self._begun = time.monotonic()
                writer.log(*row)
                self._begun = None
            if not self._problem:
                writer.close(self._failed)
        except BaseException as error:  # SystemExit too
            self._give_up(printable(shown(" ".join(f"{type(error).__name__}: {error}".split()))))
