"""Tasks by name, those of the user too, and the task of a recipe."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import TYPE_CHECKING

from vitpar.errors import RecipeError
from vitpar.models.families import family_of
from vitpar.own_files import load_class
from vitpar.tasks.classify import Classify
from vitpar.tasks.mae import MAE
from vitpar.tasks.task import LabelSet, Task
from vitpar.text import nearest, shown

if TYPE_CHECKING:
    from vitpar.training.recipe import Recipe

TASKS: dict[str, type[Task]] = {task.NAME: task for task in (Classify, MAE)}
"""Tasks by name. `load` adds those of the user."""


def load(text: str) -> str:
    """Run the file of ``FILE.py:NAME`` and make the task NAME in it known. Return `text`.

    Raises RecipeError if the file cannot be run or has no such task.
    """
    task, name = load_class(text, Task, "task", RecipeError, "Task")
    task.NAME = name
    TASKS[name] = task
    return text


def task_of(recipe: Recipe, labels: LabelSet) -> Task:
    """Return the task of a recipe for data with `labels`.

    Raises RecipeError for an unknown task or option, and for settings that the task does not support.
    """
    section, train = recipe.task, recipe.train
    task = TASKS.get(PurePath(section.name).name)
    if task is None and ".py:" in section.name:
        raise RecipeError(
            f"the task is {shown(section.name)}, one of your own, and its file is run only if you name it: give --task "
            f"{shown(section.name)}"
        )
    if task is None:
        raise RecipeError(
            f"unknown task '{shown(section.name)}'{nearest(section.name, TASKS)}: use {', '.join(TASKS)}, or one of "
            "your own with --task FILE.py:NAME"
        )
    _refuse_other_model(task, recipe.model.name)
    options = dict(section.options or {})
    known = {field.name for field in dataclasses.fields(task)} - {"labels"}
    if unknown := options.keys() - known:
        option = min(unknown)
        raise RecipeError(
            f"task.options has '{shown(option)}', which {shown(section.name)} does not{nearest(option, known)}: leave "
            "it out"
        )
    if "label_smoothing" in known:
        options["label_smoothing"] = train.label_smoothing
    elif train.label_smoothing:
        raise RecipeError(
            f"train.label_smoothing is {train.label_smoothing}, which task '{shown(section.name)}' does not have: set "
            "it to 0"
        )
    for name in ("mixup", "cutmix"):
        if getattr(recipe.augment, name) and not task.MIXES:
            raise RecipeError(
                f"augment.{name} is {getattr(recipe.augment, name)}, but task '{shown(section.name)}' does not mix "
                "images: set it to 0"
            )
    try:
        return task(labels=labels, **options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"task '{shown(section.name)}' cannot be made: {shown(error)}: correct its options") from None


def _refuse_other_model(task: type[Task], model: str) -> None:
    """Raise RecipeError for a model of a family that the task does not train."""
    family = family_of(model).FAMILY
    owner = next((other for other in TASKS.values() if family in other.FAMILIES), None)
    if owner is not None and not issubclass(task, owner):
        raise RecipeError(
            f"task '{shown(task.NAME)}' does not train {shown(model)}, which only task '{owner.NAME}' does: give "
            f"--task {owner.NAME}, or another --model"
        )
    if task.FAMILIES and family not in task.FAMILIES:
        raise RecipeError(
            f"task '{shown(task.NAME)}' does not train {shown(model)}, but only models of the family "
            f"{' or '.join(task.FAMILIES)}: give --model {_EXAMPLES[task.FAMILIES[0]]}, or another --task"
        )


_EXAMPLES = {"mae": "mae_vit_base"}
"""Name of a model by family, for messages."""
