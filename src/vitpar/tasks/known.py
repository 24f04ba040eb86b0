"""Tasks by name, those of the user too, and the task of a recipe."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from vitpar.errors import RecipeError
from vitpar.models.families import FAMILIES, family_of
from vitpar.own_files import load_class
from vitpar.tasks.classify import Classify
from vitpar.tasks.dino import DINO
from vitpar.tasks.distill import Distill
from vitpar.tasks.mae import MAE
from vitpar.tasks.task import LabelSet, Task
from vitpar.tasks.text import MaskedLanguage, SpanCorruption, TextFacts, TextTask
from vitpar.text import nearest, shown

if TYPE_CHECKING:
    from vitpar.data.stream.stream_set import ImageSet
    from vitpar.models.config import ModelConfig
    from vitpar.recipe import Recipe

TASKS: dict[str, type[Task]] = {task.NAME: task for task in (Classify, MAE, DINO, MaskedLanguage, SpanCorruption)}
"""Tasks by name. `load` adds those of the user."""


def load(text: str) -> str:
    """Run the file of ``FILE.py:NAME`` and make the task NAME in it known. Return `text`.

    Raises RecipeError if the file cannot be run or has no such task.
    """
    task, name = load_class(text, Task, "task", RecipeError, "Task")
    task.NAME = name
    TASKS[name] = task
    return text


def model_for(task: str, config: ModelConfig) -> ModelConfig | None:
    """Return the model with which the task called `task` continues the training of a model (``Task.model_for``)."""
    known = TASKS.get(PurePath(task).name)
    return None if known is None else known.model_for(config)


def task_class(recipe: Recipe) -> type[Task]:
    """Return the class of a recipe's task. Raises RecipeError for an unknown one."""
    name = recipe.task.name
    task = TASKS.get(PurePath(name).name)
    if task is None and ".py:" in name:
        raise RecipeError(
            f"the task is {shown(name)}, one of your own, and its file is run only if you name it: give --task "
            f"{shown(name)}"
        )
    if task is None:
        raise RecipeError(
            f"unknown task '{shown(name)}'{nearest(name, TASKS)}: use {', '.join(TASKS)}, or one of your own with "
            "--task FILE.py:NAME"
        )
    return task


def task_of(recipe: Recipe, data: ImageSet | LabelSet | int) -> Task:
    """Return the task of a recipe.

    data: data set, or its labels; or without one the number of the model's outputs, such as classes.

    Raises RecipeError for an unknown task or option, and for settings that the task does not support.
    """
    task, name, train = task_class(recipe), shown(recipe.task.name), recipe.train
    _refuse_other_model(task, recipe.model.name)
    options: dict[str, Any] = dict(recipe.task.options or {})
    known = {field.name for field in dataclasses.fields(task)} - {"labels", "text"}
    if unknown := options.keys() - known:
        option = min(unknown)
        raise RecipeError(
            f"task.options has '{shown(option)}', which {name} does not{nearest(option, known)}: leave it out"
        )
    if task.AVERAGES and train.ema_decay is None:
        raise RecipeError(
            f"task '{name}' learns from the average of its parameters: set train.ema_decay, such as to 0.992"
        )
    if recipe.distill.teacher is not None:
        task = Distill
        options |= recipe.distill.model_dump(include={"kind", "alpha", "tau"})
    if "label_smoothing" in known:
        options["label_smoothing"] = train.label_smoothing
    elif train.label_smoothing:
        raise RecipeError(
            f"train.label_smoothing is {train.label_smoothing}, which task '{name}' does not have: set it to 0"
        )
    for mixing in ("mixup", "cutmix"):
        if (alpha := getattr(recipe.augment, mixing)) and not task.MIXES:
            raise RecipeError(f"augment.{mixing} is {alpha}, but task '{name}' does not mix images: set it to 0")
    if issubclass(task, TextTask):
        from vitpar.data.text.text_set import TextSet

        if isinstance(data, int):
            options["text"] = TextFacts.synthetic(data)
        else:
            assert isinstance(data, TextSet), "a task of text opens text"
            words = data.tokenizer.words if options.get("whole_words") else None
            options["text"] = TextFacts(data.vocab_size, data.tokens, data.specials, words)
    else:
        labels = LabelSet(data) if isinstance(data, int) else data
        options["labels"] = labels if isinstance(labels, LabelSet) else LabelSet.of(labels)
    try:
        return task(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"task '{name}' cannot be made: {shown(error)}: correct its options") from None


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
        around = f"{task.FAMILIES[0]}_{model}"
        example = around if FAMILIES[task.FAMILIES[0]].knows(around) else _EXAMPLES[task.FAMILIES[0]]
        raise RecipeError(
            f"task '{shown(task.NAME)}' does not train {shown(model)}, but only models of the family "
            f"{' or '.join(task.FAMILIES)}: give --model {example}, or another --task"
        )


_EXAMPLES = {"mae": "mae_vit_base", "dino": "dino_vit_small_patch14_224"}
"""Name of a model by family, for messages."""
