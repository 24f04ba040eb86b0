"""Events of a training run for a user interface, for log.txt as plain lines, and for metrics.jsonl as rows.

The library prints nothing; the command line implements a `Reporter`.
"""

from dataclasses import dataclass
from typing import Any

from vitpar.models.config import ModelConfig
from vitpar.recipe import Recipe
from vitpar.strategy import Plan
from vitpar.tasks import Task
from vitpar.training.run_folder import RunFolder

Row = dict[str, Any]
"""Row of metrics.jsonl, or a summary: numbers and words by name."""


@dataclass(frozen=True)
class SettingsOrigin:
    """Origin of settings that the user did not give."""

    default_images: int | None = None
    """Training images whose defaults the recipe has (``vitpar.recipe.defaults``); None for fixed defaults."""
    automatic_precision: bool = False
    """Whether the precision follows the device (``vitpar.recipe.machine``)."""


@dataclass(frozen=True)
class RunHeader:
    """Description of a run before it starts."""

    recipe: Recipe
    """Recipe with its precision resolved."""
    task: Task
    """Task that is trained."""
    config: ModelConfig
    """Configuration of the model."""
    plan: Plan
    """Plan of the run."""
    device: str
    """Device of rank 0."""
    parameters: int
    """Parameters of the global model."""
    state_bytes: int
    """Bytes of parameters, gradients, optimizer state and averages on the fullest rank, without activations."""
    train_samples: int
    """Images of the training set."""
    val_samples: int
    """Images of the validation set; 0 without one."""
    steps: int
    """Steps of the complete run."""
    folder: str
    """Folder of the run."""
    compiled: bool = False
    """Whether blocks are compiled, so that the first step takes long."""
    origin: SettingsOrigin = SettingsOrigin()
    """Origin of settings that the user did not give."""
    changed: str = ""
    """Settings of a resumed run that differ from those before, in words."""

    def facts(self, done: int) -> Row:
        """Return the row of metrics.jsonl about the start (``vitpar.runs.metrics.RunStart``). done: steps before it."""
        names = ("parameters", "device", "train_samples", "val_samples", "steps", "changed")
        return {
            "step": done,
            "model": self.config.name,
            "plan": str(self.plan),
            "batch_size": self.recipe.train.batch_size,
            **{name: getattr(self, name) for name in names},
        }


class Reporter:
    """Receiver of the events of a run, on rank 0 only. This one shows nothing."""

    def started(self, header: RunHeader) -> None:
        """Report the run, before the first step."""

    def reached(self, step: int) -> None:
        """Report that a step is computed, or queued on a device that knows its loss later. Must be cheap."""

    def stepped(self, row: Row) -> None:
        """Report the newest row of metrics.jsonl, after every log interval."""

    def evaluating(self, images: int, total: int) -> None:
        """Report the progress of an evaluation: images evaluated so far, and all of them."""

    def evaluated(self, row: Row) -> None:
        """Report the row of an evaluation in metrics.jsonl."""

    def note(self, text: str) -> None:
        """Report a warning."""

    def info(self, text: str) -> None:
        """Report a message about the run: that it resumes from a checkpoint, or was asked to end."""

    def finished(self, summary: Row) -> None:
        """Report the summary, after the last step, evaluation and save."""

    def close(self) -> None:
        """Release the terminal, also after an error. Further calls do nothing."""


class Logged(Reporter):
    """Reporter that writes events to the log.txt of `folder`, warnings and the end also to its metrics.jsonl.

    It passes all events on to `shown`.
    """

    def __init__(self, folder: RunFolder, shown: Reporter, task: Task) -> None:
        self._log, self._event, self._shown, self._task = folder.log, folder.event, shown, task

    def started(self, header: RunHeader) -> None:
        sample = self._task.SAMPLE
        self._log(
            f"start  {header.config.name}, {header.parameters:,} parameters, {header.plan} on {header.device}, "
            f"{header.train_samples:,} training {sample}s, {header.val_samples:,} validation {sample}s, "
            f"{header.steps:,} steps of batch size {header.recipe.train.batch_size:,}"
        )
        self._shown.started(header)

    def stepped(self, row: Row) -> None:
        loss, norm = (float("nan") if row[key] is None else row[key] for key in ("loss", "grad_norm"))
        scale = f"scale {row['loss_scale']:,.10g}  " if "loss_scale" in row else ""
        measured = self._task.training_words(row)
        measured = measured and f"{measured}  "
        self._log(
            f"step {row['step']:,}  loss {loss:.4f}  {measured}lr {row['lr']:.3g}  grad norm {norm:.3g}  {scale}"
            f"{row['images_per_second']:,.1f} {self._task.SAMPLE}s/s  step {row['step_ms']:,.1f} ms  "
            f"data {row['data_ms']:,.1f} ms"
        )
        self._shown.stepped(row)

    def evaluating(self, images: int, total: int) -> None:
        self._shown.evaluating(images, total)

    def evaluated(self, row: Row) -> None:
        self._log(f"eval {row['step']:,}  val {self._task.words(row)}")
        self._shown.evaluated(row)

    def note(self, text: str) -> None:
        self._log(f"warning: {text}")
        self._event("warning", text=text)
        self._shown.note(text)

    def info(self, text: str) -> None:
        self._log(text)
        self._shown.info(text)

    def finished(self, summary: Row) -> None:
        result = f"val {self._task.words(summary)}" if self._task.best.name in summary else "not evaluated"
        self._log(f"done  {result}  weights {summary['weights']}")
        self._event("done")
        self._shown.finished(summary)
