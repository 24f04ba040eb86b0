"""A run for Python: its metrics, settings and plan, and what can be done with its weights."""

from __future__ import annotations

import warnings
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from vitpar.data.image_files import ImageFiles, NotedImages, expand_images
from vitpar.errors import DataError
from vitpar.io import write_text
from vitpar.launch import in_world
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.request import NO_DATA, RecipeRequest
from vitpar.runs.folder import RunRecord, refuse_other_folders, summary
from vitpar.runs.metrics import Column
from vitpar.runs.page import report
from vitpar.runs.pages.document import facts
from vitpar.strategy import Plan
from vitpar.tasks.task import LOSS
from vitpar.training.saved_model import AT_ONCE, saved_model
from vitpar.training.saving.resume import weights_folder


class Run:
    """A run that ended or still trains. Every use reads its files again.

    folder: folder of the run, such as runs/mine. Raises DataError if it is not that of a run.

    Methods compute on one device: cpu or cuda, by default cuda where there is a GPU.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).expanduser()
        refuse_other_folders(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """State, plan, steps, loss, first metric and speed, as `vitpar runs --json` prints them."""
        return summary(RunRecord(self.folder))

    @property
    def metrics(self) -> dict[str, Column]:
        """Columns of numbers for each step that was logged or evaluated, NaN where a step has none.

        Those of evaluations begin with val_, as in val_loss. `pandas.DataFrame(run.metrics)` makes a table.
        """
        metrics = RunRecord(self.folder).metrics
        steps = np.union1d(metrics.train["step"], metrics.eval["step"])
        axes = {axis: metrics.at(axis, steps) for axis in ("step", "samples", "hours")}
        columns = dict(axes)
        for prefix, kind in (("", metrics.train), ("val_", metrics.eval)):
            for name, values in kind.items():
                if name not in axes and np.isfinite(values).any():
                    columns[f"{prefix}{name}"] = np.full(len(steps), np.nan)
                    columns[f"{prefix}{name}"][np.searchsorted(steps, kind["step"])] = values
        return columns

    @property
    def settings(self) -> Recipe:
        """Settings of the run."""
        return read_recipe(self.folder / "recipe.toml")

    @property
    def plan(self) -> Plan | None:
        """Plan of the run; None if it cannot be read."""
        return RunRecord(self.folder).plan

    @property
    def weights(self) -> Path:
        """Folder of the final weights, or else of the newest checkpoint."""
        return weights_folder(self.folder)

    def predict(self, *images: Path | str, top: int = 5, device: str | None = None) -> list[dict[str, Any]]:
        """Return what the model predicts for image files, or all in a folder, as `vitpar predict --json` prints it.

        top: number of classes of each image, the most probable first.
        """
        from vitpar.training.inference import answers

        files = NotedImages(ImageFiles(expand_images(map(Path, images))))
        saved = saved_model(self.folder, RecipeRequest(given=NO_DATA), doing="a prediction")
        names = saved.class_names()
        with saved.on_device(min(len(files), AT_ONCE), device) as (model, inputs):
            return answers(model, inputs, files, top, names)

    def features(self, *images: Path | str, device: str | None = None) -> np.ndarray[Any, Any]:
        """Return what the classifier reads of image files, or all in a folder, float32 [images, features].

        Raises DataError for an image that cannot be read.
        """
        from vitpar.training.inference import outputs

        files = NotedImages(ImageFiles(expand_images(map(Path, images))))
        saved = saved_model(self.folder, RecipeRequest(given=NO_DATA), doing="an extraction of features").encoder()
        with saved.on_device(min(len(files), AT_ONCE), device) as (model, inputs):
            batches = [batch.features.numpy() for batch in outputs(model, inputs, files, features=True)]
        if files.problems:
            raise DataError(f"{next(iter(files.problems.values()))}: leave it out")
        return np.concatenate(batches)

    def evaluate(
        self, data: Path | str | None = None, *, split: str = "val", device: str | None = None
    ) -> dict[str, float]:
        """Return samples, loss and metrics on a split of packed data, by default of the run's own."""
        from vitpar.tasks.data import open_split
        from vitpar.tasks.inputs import build_input
        from vitpar.training.evaluate import evaluate

        given = {"data.path": None if data is None else str(data)}
        saved = saved_model(self.folder, RecipeRequest(given=given), doing="an evaluation")
        images, note = saved.labelled(open_split(saved.recipe, split))
        planned = saved.planned(device)
        with in_world(planned.device_type) as place:
            model, _ = planned.built(place, {saved.recipe.data_name: images})
            result = evaluate(model, build_input(planned.recipe, model, planned.task(images)), images)
        for text in filter(None, (note, result.warning)):
            warnings.warn(text, stacklevel=2)
        return result.figures

    def report(self, path: Path | str = "report.html") -> None:
        """Write a page with charts and settings of the run to the file `path`, as `vitpar report` does."""
        write_text(Path(path), report([RunRecord(self.folder)], made_by="vitpar.Run.report"))

    def __repr__(self) -> str:
        return f"Run({', '.join(f'{name} {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        return facts({name: escape(value) for name, value in self._facts().items()})

    def _facts(self) -> dict[str, str]:
        run = RunRecord(self.folder)
        known = {"folder": str(run.path), "state": run.state, "plan": run.plan_words, "steps": f"{run.metrics.steps:,}"}
        for metric in (LOSS, *run.task_metrics):
            known |= {} if (value := run.last(metric.name)) is None else {f"val {metric.words}": metric.shown(value)}
        return known
