"""Duration of a complete training: its steps and images by the recipe, its days and device-hours by a plan's price."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from vitpar.data.shards.manifest import MANIFEST, read_manifest
from vitpar.planner.cost.price import Price
from vitpar.planner.profile.profiles import Hardware
from vitpar.training.recipe.defaults import row_for
from vitpar.training.recipe.recipe import Recipe

IMAGENET_1K = 1_281_167
"""Training images of ImageNet-1k, which stand for a data set that is unknown."""


@dataclass(frozen=True)
class TrainingLength:
    """Length of a training, at any batch size."""

    recipe: Recipe
    """Recipe with epochs or steps."""
    samples: int
    """Images of the training set."""
    assumed: str = ""
    """Assumptions, and how to change them; empty if there are none."""

    def steps(self, batch_size: int) -> int:
        """Return the number of steps with `batch_size` images each."""
        train = self.recipe.train.model_copy(update={"batch_size": batch_size})
        return self.recipe.model_copy(update={"train": train}).total_steps(self.samples)


@dataclass(frozen=True)
class TrainingTime:
    """Predicted duration of a complete training, without evaluation, checkpoints and waiting for images."""

    steps: int
    """Number of steps."""
    images: int
    """Training images that are seen in all steps."""
    seconds: float
    """Duration in seconds."""
    device_hours: float
    """Hours times devices."""
    epochs: float | None
    """Passes over the training set; None if the length is given in steps."""
    samples: int
    """Images of the training set."""
    assumed: str
    """Assumptions about the length; empty if there are none."""

    @property
    def days(self) -> float:
        """Return the duration in days."""
        return self.seconds / 86_400

    def words(self, hours: str) -> str:
        """Return text such as `1.25 days, 240 GPU-hours: 375,342 steps, 300 epochs of 1,281,167 samples`.

        hours: name of device-hours
        """
        units = (("days", 86_400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
        spent = next(
            f"{figure(self.seconds / unit)} {name}" for name, unit in units if self.seconds >= unit or unit == 1
        )
        length = f"{self.images:,} samples"
        if self.epochs is not None:
            length = f"{self.epochs:g} epoch{'s' * (self.epochs != 1)} of {self.samples:,} samples"
        return (
            f"{spent}, {figure(self.device_hours)} {hours}: {self.steps:,} steps, {length}; evaluation and checkpoints "
            "not included"
        )

    def to_json(self) -> dict[str, object]:
        """Return all figures as JSON."""
        return asdict(self)


def training_length(recipe: Recipe) -> TrainingLength:
    """Return the length of a recipe's training.

    Data that are not on this machine count as ImageNet-1k. A recipe with neither epochs nor steps has the epochs of the
    default settings for that number of images.

    Raises DataError for data that cannot be read.
    """
    train, samples = recipe.train, _samples(recipe)
    images, known = samples or IMAGENET_1K, samples is not None
    if train.epochs is None and train.steps is None:
        train = train.model_copy(update={"epochs": float(row_for(images).epochs)})
        recipe = recipe.model_copy(update={"train": train})
        of = f"{images:,} images" if known else f"ImageNet-1k's {images:,} images"
        others = "another number with --epochs" if known else "others with --epochs and --data"
        return TrainingLength(recipe, images, f"{train.epochs:g} epochs of {of} are assumed: give {others}")
    if known or train.steps is not None:
        return TrainingLength(recipe, images)
    return TrainingLength(recipe, images, f"ImageNet-1k's {images:,} images are assumed: name other data with --data")


def training_time(price: Price, length: TrainingLength) -> TrainingTime:
    """Return the duration of a training under a plan."""
    steps, batch_size, ranks = length.steps(price.batch_size), price.batch_size, price.plan.world_size
    seconds = steps * price.seconds
    return TrainingTime(
        steps,
        steps * batch_size,
        seconds,
        seconds * ranks / 3600,
        length.recipe.train.epochs,
        length.samples,
        length.assumed,
    )


def hours_name(hardware: Hardware) -> str:
    """Return the name of device-hours: GPU-hours, or rank-hours on CPUs."""
    return "GPU-hours" if hardware.device == "cuda" else "rank-hours"


def figure(number: float) -> str:
    """Return a number with three digits, or without decimals if it is larger: `0.0123`, `1.20`, `48.2`, `12,345`."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:#.3g}"


def _samples(recipe: Recipe) -> int | None:
    """Return the number of training images of the recipe's data; None if they are not on this machine."""
    path = recipe.data.path
    if path is None:
        return recipe.stream.samples
    split = read_manifest(path).splits.get("train") if (Path(path) / MANIFEST).is_file() else None
    return split.samples if split else None
