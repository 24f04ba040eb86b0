"""Events of a training run for a user interface, for log.txt as plain lines, and for metrics.jsonl as rows.

The library prints nothing; the command line implements a `Reporter`.
"""

from dataclasses import dataclass
from typing import Any

from vitpar.models.config import ModelConfig
from vitpar.recipe import Recipe
from vitpar.strategy import Plan
from vitpar.tasks import Task

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
