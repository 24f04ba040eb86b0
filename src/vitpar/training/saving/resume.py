"""Where a run goes on: the newest checkpoint that is whole, or one that is named, of a recipe that trains the same."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vitpar.checkpoint import Checkpoint, Checkpoints
from vitpar.checkpoint.index import INDEX, PLAN, RECIPE
from vitpar.errors import CheckpointError, RecipeError
from vitpar.launch.world_group import broadcast_json
from vitpar.training.recipe import Recipe, read_recipe

FREE = (
    *(f"train.{key}" for key in ("compile", "attention", "activation_memory_budget", "eval_every", "log_every")),
    *("stream.val", "stream.val_samples", "stream.allow_pipe"),
    *("data.path", "data.workers", "parallel.…", "communication.…", "checkpoint.…", "faults.…"),
)
"""Settings that do not change what is trained (data are compared by what they hold), ``section.…`` for all of one."""
_CHECKPOINTS = "checkpoints"
DATA = "data"
"""Stands for the training set itself where changes are allowed by name."""


def checkpoints_of(run: Path) -> Checkpoints:
    """The checkpoints of the run in folder `run`, which need not exist."""
    return Checkpoints(run / _CHECKPOINTS)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is meant as a checkpoint, whole or not, and not as a run."""
    return (path / INDEX).exists() or path.parent.name == _CHECKPOINTS


def has_checkpoint(path: Path) -> bool:
    """Whether there is something to go on from at `path`: a checkpoint, or a run that has one."""
    return is_checkpoint(path) or bool(checkpoints_of(path).steps())


def run_of(path: Path) -> Path | None:
    """The folder of the run that `path` is or belongs to; None for a checkpoint that lies elsewhere."""
    if not is_checkpoint(path):
        return path
    parent = path.parent if path.parent.name == _CHECKPOINTS else path.resolve().parent
    return parent.parent if parent.name == _CHECKPOINTS else None


def same_run(run: Path, path: Path) -> bool:
    """Whether `path` is, or belongs to, the run in `run`."""
    other = run_of(path)
    return other is not None and run.resolve() == other.resolve()


@dataclass(frozen=True)
class Resumed:
    """Source of a run that is resumed.

    source: a run's folder or one of its checkpoints, None to begin. recipe: the file that the run goes on with, if
    none is named."""

    source: Path | None = None
    recipe: Path | None = None

    @property
    def run(self) -> Path | None:
        """The folder of the run that goes on."""
        return self.source and run_of(self.source)

    @property
    def begins(self) -> bool:
        """Whether there is nothing to go on from."""
        return self.source is None or not has_checkpoint(self.source)

    def mesh(self) -> str | None:
        """Return the saved copy of its plan, where the recipe names a file, which may be gone or changed by now."""
        if self.recipe is None:
            return None
        parallel = read_recipe(self.recipe).parallel
        # Beside others it may not be the one that ran, so the file has to be there.
        if not parallel.mesh.endswith(".json") or parallel.fallback_meshes:
            return None
        return str(self.recipe.with_name(PLAN))


def resumed(resume: str | None, run_dir: Path | None) -> Resumed:
    """Interpret ``vitpar train --resume``: auto, a path or never. Raises RecipeError."""
    if resume is None or resume == "never":
        return Resumed()
    if resume == "auto":
        if run_dir is None:
            raise RecipeError("--resume auto needs to know which run: name its folder with --run-dir")
        source = run_dir
    else:
        source = Path(resume)
        if not (source / RECIPE).is_file():
            raise RecipeError(
                f"--resume '{resume}' is neither the folder of a run nor a checkpoint ({RECIPE} is missing): name "
                "one such as runs/… or runs/…/checkpoints/step_450"
            )
        if not has_checkpoint(source):
            raise RecipeError(
                f"--resume '{resume}' has no checkpoint to go on from: to begin, use --resume auto --run-dir {resume}"
            )
        if run_dir is None and run_of(source) is None:
            raise RecipeError(f"--resume '{resume}' does not lie in a run: name the folder of a new one with --run-dir")
    recipe = source / RECIPE
    return Resumed(source, recipe if recipe.is_file() else None)


def find(path: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint `path`, or the newest whole one of the run in it, None where it has none. Collective.

    warn: told of each that is damaged. Raises CheckpointError where the one that was named is, or all are.
    """
    if is_checkpoint(path):
        return Checkpoint.open_whole(path)
    there = checkpoints_of(path)
    steps = broadcast_json(there.steps() if dist.get_rank() == 0 else [])
    for step in reversed(steps):
        try:
            return Checkpoint.open_whole(there.path(step))
        except CheckpointError as error:
            if step == steps[0]:
                raise
            warn(f"{error}: an older checkpoint is used")
    return None


def allowed_changes(checkpoint: Checkpoint, recipe: Recipe, fingerprint: str, allowed: Collection[str]) -> set[str]:
    """The settings, and perhaps `data`, in which `recipe` trains otherwise than `checkpoint` was trained.

    fingerprint: of the training set. Raises CheckpointError for any that is not in `allowed`.
    """
    changed = changes(read_recipe(checkpoint.path / RECIPE), recipe)
    if checkpoint.facts.data != fingerprint:
        changed[DATA] = "the training set is another"
    # Another optimizer brings its own settings.
    free = {*allowed, *(key for key in changed if key.startswith("optimizer.") and "optimizer.name" in allowed)}
    refused = {key: words for key, words in changed.items() if key not in free or _is_shape(key)}
    if refused:
        keys = " ".join(f"--allow-change {key}" for key in refused)
        instead = "" if any(map(_is_shape, refused)) else f", or go on with {keys}"
        raise CheckpointError(
            f"'{checkpoint.path}' is of another training: {'; '.join(refused.values())}: change it back{instead}"
        )
    return set(changed)


def _is_shape(key: str) -> bool:
    """Whether a setting says which parameters there are: with others there is nothing to go on from."""
    no_shapes = ("model.dropout", "model.drop_path", "model.init", "model.name", "model.norm_eps", "model.weights")
    return key.startswith("model.") and key not in no_shapes


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
