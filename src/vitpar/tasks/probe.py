"""Trial of a task on made-up outputs, so that mistakes in a task of the user end in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitpar.errors import RecipeError
from vitpar.tasks.task import Task
from vitpar.text import shown

SAMPLES = 3
"""Samples of the trial."""


def refuse_wrong_task(task: Task, checked: bool = False) -> None:
    """Raise RecipeError for a task of the user whose functions fail, or return other shapes than the contract says.

    checked: whether `vitpar check` needs its `reference`.
    """
    if checked and task.unchecked:
        raise RecipeError(task.unchecked)
    if type(task).__module__.startswith("vitpar.tasks."):
        return

    def tried(name: str, *arguments: Any) -> Any:
        try:
            member = getattr(task, name)
            return member(*arguments) if arguments else member
        except NotImplementedError:
            raise RecipeError(f"task '{shown(task.NAME)}' has no `{name}`: define it (docs/own-task.md)") from None
        except Exception as error:  # of the user's code
            raise RecipeError(
                f"`{name}` of task '{shown(task.NAME)}' fails: {type(error).__name__}: {shown(error)}: correct it"
            ) from error

    def per_sample(name: str, value: object) -> None:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != [SAMPLES]:
            raise RecipeError(
                f"{name} of task '{shown(task.NAME)}' is {shape} for {SAMPLES} samples: return a number for each "
                "sample, [batch]"
            )

    if task.LOCAL_TARGETS:
        return  # its shapes are the model's
    size = tried("outputs")
    if not isinstance(size, int) or size < 1:
        raise RecipeError(f"`outputs` of task '{shown(task.NAME)}' is {shown(size)}: return a number from 1")
    labels = torch.arange(SAMPLES) % max(1, task.labels.count)
    outputs = torch.linspace(-1.0, 1.0, SAMPLES * size).view(SAMPLES, size)
    targets = tried("targets", labels)
    if not isinstance(targets, Tensor) or targets.shape[:1] != (SAMPLES,):
        raise RecipeError(f"`targets` of task '{shown(task.NAME)}' has no row for each sample: return [batch, …]")
    if not _overrides(task, "total"):
        per_sample("`losses`", tried("losses", outputs, targets))
    if not _overrides(task, "sums"):
        figures = tried("figures", outputs, targets)
        for metric in task.METRICS:
            if metric.name not in figures:
                raise RecipeError(
                    f"`figures` of task '{shown(task.NAME)}' has no '{shown(metric.name)}', which METRICS names: add it"
                )
            per_sample(f"`figures`['{shown(metric.name)}']", figures[metric.name])
    if checked:
        per_sample("`reference`", tried("reference", outputs, targets))
    for name, values in tried("predict", outputs).items():
        if not isinstance(values, Tensor) or values.ndim not in (1, 2) or len(values) != SAMPLES:
            raise RecipeError(
                f"`predict` of task '{shown(task.NAME)}' gives a '{shown(name)}' that is not [batch] or [batch, k]: "
                "correct it"
            )


def _overrides(task: Task, name: str) -> bool:
    function: Callable[..., Any] = getattr(type(task), name)
    return function is not getattr(Task, name)
