"""Preparation of a run: all that is known of it before its ranks start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitpar.errors import RecipeError
from vitpar.models.config import ModelConfig
from vitpar.strategy import Plan
from vitpar.tasks import LabelSet, Task, task_of
from vitpar.training.events import SettingsOrigin
from vitpar.training.input import ImageSet, open_data
from vitpar.training.recipe import Recipe


@dataclass(frozen=True)
class Prepared:
    """Run that is ready to start: every setting is resolved, and nothing in it is refused any more."""

    recipe: Recipe
    """Recipe with its precision resolved."""
    config: ModelConfig
    """Configuration of the model."""
    task: Task
    """What is trained."""
    plan: Plan
    """Plan, validated against model and batch, with known degrees."""
    train_set: ImageSet
    """Training set."""
    val_set: ImageSet | None = None
    """Validation set; None if the data have none."""
    run_dir: Path | None = None
    """Folder of the run; None for a new one under runs/."""
    resume: Path | None = None
    """Checkpoint to resume from, or the folder of a run, whose newest complete checkpoint is used; a run without one
    starts from the beginning."""
    allow_change: Sequence[str] = ()
    """Settings that may differ from those of the checkpoint (``vitpar.training.saving.resume``)."""
    messages: Sequence[str] = ()
    """Messages to print at the start."""
    notes: Sequence[str] = ()
    """Warnings to print at the start."""
    origin: SettingsOrigin = field(default_factory=SettingsOrigin)
    """Origin of settings, for the header."""


def prepared(recipe: Recipe, plan: Plan, device_type: str, **more: object) -> Prepared:
    """Return a run of `recipe` under `plan`. more: further fields of `Prepared`."""
    from vitpar.training.recipe.machine import replace_auto_precision

    recipe = replace_auto_precision(recipe, device_type)
    train_set, val_set = open_data(recipe)
    if val_set is None and recipe.checkpoint.keep_best:
        raise RecipeError(
            f"checkpoint.keep_best needs evaluations, but '{train_set.place}' has no val split: set it to "
            "false, or pack the data with one"
        )
    task = task_of(recipe, LabelSet.of(train_set))
    config = recipe.config(task.outputs)
    return Prepared(recipe, config, task, plan, train_set, val_set, **more)  # type: ignore[arg-type]
