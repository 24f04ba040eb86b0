"""What a training run tells whoever shows it. The library prints nothing; the command line implements this."""

from dataclasses import dataclass
from typing import Any, Protocol

from vitpar.models.config import ViTConfig
from vitpar.strategy import Plan
from vitpar.training.recipe import Recipe


@dataclass(frozen=True)
class Origin:
    """Where settings of a recipe come from that nobody gave."""

    default_images: int | None = None
    """Number of training images whose defaults the recipe has (``vitpar.training.recipe.defaults``); None for fixed
    defaults."""
    automatic_precision: bool = False
    """Whether the precision follows the device (``vitpar.training.recipe.auto_precision``)."""


@dataclass(frozen=True)
class RunHeader:
    """What will run. state_bytes: parameters, gradients and optimizer of the fullest rank, activations not counted."""

    recipe: Recipe
    config: ViTConfig
    plan: Plan
    device: str
    parameters: int
    state_bytes: int
    train_samples: int
    val_samples: int
    steps: int
    folder: str
    origin: Origin = Origin()


class Reporter(Protocol):
    """Receives the events of a run, on rank 0 only."""

    def started(self, header: RunHeader) -> None:
        """Before the first step."""

    def stepped(self, row: dict[str, Any]) -> None:
        """After every log interval, with the newest row of metrics.jsonl."""

    def evaluated(self, row: dict[str, Any]) -> None:
        """After every evaluation, with its row of metrics.jsonl."""

    def note(self, text: str) -> None:
        """A warning."""

    def told(self, text: str) -> None:
        """What became of the run: that it goes on from a checkpoint, or was asked to end."""

    def finished(self, summary: dict[str, Any]) -> None:
        """After the last step, evaluation and save."""


class Silent:
    """Shows nothing."""

    def started(self, header: RunHeader) -> None:
        pass

    def stepped(self, row: dict[str, Any]) -> None:
        pass

    def evaluated(self, row: dict[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def told(self, text: str) -> None:
        pass

    def finished(self, summary: dict[str, Any]) -> None:
        pass
