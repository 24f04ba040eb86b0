"""Where a run goes on: the newest checkpoint that is whole, or one that is named, of a recipe that trains the same."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vitpar.checkpoint import Checkpoint, Checkpoints
from vitpar.errors import CheckpointError, RecipeError
from vitpar.train.recipe import Recipe, read_recipe
from vitpar.train.training_state import RECIPE

FREE = (
    *(f"train.{key}" for key in ("compile", "activation_memory_budget", "eval_every", "log_every")),
    *("stream.val", "stream.val_samples", "stream.allow_pipe"),
    *("data.path", "data.workers", "parallel.…", "communication.…", "checkpoint.…"),
)
"""Settings that do not change what is trained (data are compared by what they hold), ``section.…`` for all of one."""
DATA = "data"
"""Stands for the training set itself where changes are allowed by name."""


def checkpoints_of(run: Path) -> Path:
    """Where the checkpoints of the run in folder `run` are."""
    return run / "checkpoints"


def run_of(path: Path) -> Path:
    """The run that `path` belongs to: its folder, or one of its checkpoints."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def find(path: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint `path`, or the newest whole one of the run in it, None where it has none. Collective.

    warn: told, on rank 0, of each that is damaged. Raises CheckpointError where the one that was named is.
    """
    if path.parent.name == "checkpoints":
        found = _opened(path)
        if isinstance(found, str):
            raise CheckpointError(found)
        return found
    there = Checkpoints(checkpoints_of(path))
    steps = [there.steps() if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(steps, 0)
    for step in reversed(steps[0]):
        found = _opened(there.path(step))
        if not isinstance(found, str):
            return found
        if dist.get_rank() == 0:
            warn(f"{found}: an older checkpoint is used")
    return None


def _opened(path: Path) -> Checkpoint | str:
    """A whole checkpoint, or what is wrong with it; the same on all ranks, which share the reading."""
    found, wrong = None, None
    try:
        found = Checkpoint.open(path)
        wrong = found.damage(dist.get_rank(), dist.get_world_size())
        wrong = wrong and f"the checkpoint '{path}' is damaged: {wrong}"
    except CheckpointError as error:
        wrong = str(error)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    first = next((wrong for wrong in everyone if wrong), None)
    assert first is not None or found is not None
    return first or found  # type: ignore[return-value]


def refuse_other(checkpoint: Checkpoint, recipe: Recipe, fingerprint: str, allowed: Collection[str]) -> None:
    """Raise CheckpointError where going on from `checkpoint` with `recipe` would be another training.

    fingerprint: of the training set. allowed: keys of settings that may differ, and `data`.
    """
    changed = changes(read_recipe(checkpoint.path / RECIPE), recipe)
    if checkpoint.facts["data"] != fingerprint:
        changed[DATA] = "the training set is another"
    for key in allowed:
        if key not in changed:
            raise RecipeError(f"--allow-change {key} allows nothing, since it did not change: leave it out")
    refused = {key: words for key, words in changed.items() if key not in allowed}
    if refused:
        keys = " ".join(f"--allow-change {key}" for key in refused)
        raise CheckpointError(
            f"'{checkpoint.path}' is of another training: {'; '.join(refused.values())}: change it back, or go on with "
            f"{keys}"
        )


def changes(before: Recipe, after: Recipe) -> dict[str, str]:
    """The settings in which two recipes would train differently, by key, each with a few words on it."""
    old, new = _flat(before), _flat(after)
    different = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    matters = [key for key in different if key not in FREE and f"{key.partition('.')[0]}.…" not in FREE]
    return {key: f"{key} was {_shown(old.get(key))} and is {_shown(new.get(key))}" for key in matters}


def _flat(recipe: Recipe) -> dict[str, Any]:
    values = recipe.model_dump(mode="json")
    return {f"{section}.{key}": value for section, settings in values.items() for key, value in settings.items()}


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
