"""Writers to the trackers. Each runs in a thread of its own (`vitpar.training.tracking.tracker`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

FLUSH_S = 5
"""Seconds after which TensorBoard's file has what was logged."""


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


class TrackerWriter(Protocol):
    """Writer of one run to one tracker."""

    def __init__(self, run: TrackedRun) -> None:
        """Begin or continue the run, and log its facts."""

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Log numbers by name.

        step: number of the step; never less than that of the call before.
        time: of the step, in seconds since the epoch.
        """

    def close(self, failed: bool) -> None:
        """Write what is left and end the run."""


class TensorBoardWriter(TrackerWriter):
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


class WandbWriter(TrackerWriter):
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


class TrackioWriter(TrackerWriter):
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


WRITERS: dict[str, type[TrackerWriter]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "trackio": TrackioWriter,
}
"""Writer of each tracker."""
