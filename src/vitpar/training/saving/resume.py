"""Resuming: the checkpoint to resume from, and the settings that may differ from those it was trained with."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vitpar.checkpoint.folder import Checkpoint, Checkpoints
from vitpar.checkpoint.index import CONFIG, INDEX, PLAN, RECIPE, read_class_names
from vitpar.data.stream.stream_set import ImageSet
from vitpar.errors import CheckpointError, RecipeError
from vitpar.recipe import Recipe, read_recipe
from vitpar.tasks import Task

FREE = (
    *(f"train.{key}" for key in ("compile", "attention", "activation_memory_budget", "eval_every", "log_every")),
    *("stream.val", "stream.val_samples", "stream.allow_pipe", "distill.teacher", "distill.plan"),
    *("data.path", "data.workers", "data.cache", "data.cache_gb"),
    *("parallel.…", "communication.…", "checkpoint.…", "faults.…", "track.…"),
)
"""Settings that do not change the training; ``section.…`` stands for all of a section.

Data sets and teachers are compared by content instead of by path.
"""
_CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run."""
DATA = "data"
"""Name of the training set itself among the changes that are allowed."""


def checkpoints_of(run: Path) -> Checkpoints:
    """Return the checkpoints of the run in folder `run`, which need not exist."""
    return Checkpoints(run / _CHECKPOINTS)


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint, complete or not, and not a run."""
    return (path / INDEX).exists() or path.parent.name == _CHECKPOINTS


def has_checkpoint(path: Path) -> bool:
    """Return whether `path` can be resumed from: a checkpoint, or a run that has one."""
    return is_checkpoint(path) or bool(checkpoints_of(path).steps())


def run_of(path: Path) -> Path | None:
    """Return the folder of the run that `path` is or belongs to; None for a checkpoint outside a run."""
    if not is_checkpoint(path):
        return path
    parent = path.parent if path.parent.name == _CHECKPOINTS else path.resolve().parent
    return parent.parent if parent.name == _CHECKPOINTS else None


def weights_folder(path: Path) -> Path:
    """Return the folder to read weights from: `path` or, if that is a run, its weights or its newest checkpoint."""
    if (path / CONFIG).exists() or is_checkpoint(path):
        return path
    if (path / "weights").is_dir():
        return path / "weights"
    there = checkpoints_of(path)
    return there.path(there.steps()[-1]) if there.steps() else path


def same_run(run: Path, path: Path) -> bool:
    """Return whether `path` is, or belongs to, the run in `run`."""
    other = run_of(path)
    return other is not None and run.resolve() == other.resolve()


@dataclass(frozen=True)
class Resumed:
    """Source that a run is resumed from."""

    source: Path | None = None
    """Folder of a run or one of its checkpoints; None to start a new run."""
    recipe: Path | None = None
    """Recipe of the source, for the resumed run if none is named. None if there is none."""

    @cached_property
    def before(self) -> Recipe | None:
        """Content of `recipe`. Raises RecipeError."""
        return None if self.recipe is None else read_recipe(self.recipe)

    @property
    def run(self) -> Path | None:
        """Folder of the run that is resumed; None if the source belongs to none."""
        return self.source and run_of(self.source)

    @property
    def begins(self) -> bool:
        """Whether the run starts from the beginning, since there is no checkpoint."""
        return self.source is None or not has_checkpoint(self.source)

    def mesh(self) -> str | None:
        """Return the saved plan's path if the mesh was a plan file, which may have changed since; else None."""
        if self.recipe is None or self.before is None:
            return None
        parallel = self.before.parallel
        # With fallback meshes the saved plan may be that of a fallback, so the named file is needed.
        named = parallel.mesh.endswith(".json") and not parallel.fallback_meshes
        return str(self.recipe.with_name(PLAN)) if named else None


def resumed(resume: str | None, run_dir: Path | None) -> Resumed:
    """Interpret the value of ``vitpar train --resume``: auto, a path or never. Raises RecipeError."""
    if resume is None or resume == "never":
        return Resumed()
    if resume == "auto":
        if run_dir is None:
            raise RecipeError("--resume auto requires --run-dir: name the folder of the run")
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
                f"--resume '{resume}' has no checkpoint to resume from: to start the run, use --resume auto "
                f"--run-dir {resume}"
            )
        if run_dir is None and run_of(source) is None:
            raise RecipeError(
                f"--resume '{resume}' is not in the folder of a run: name a new run folder with --run-dir"
            )
    recipe = source / RECIPE
    return Resumed(source, recipe if recipe.is_file() else None)


def counting_images(recipe: Recipe, source: Resumed) -> Recipe:
    """Return the recipe of a resumed run, so that another batch size than before does not change its length.

    Lengths in steps, `train.steps` and `lr_schedule.warmup`, are converted unless they were changed too.
    """
    before = source.before
    if source.begins or before is None:
        return recipe
    after = before.with_batch_size(recipe.train.batch_size)
    steps, warmup = recipe.train.steps, recipe.lr_schedule.warmup
    if steps == before.train.steps:
        steps = after.train.steps
    if warmup == before.lr_schedule.warmup:
        warmup = after.lr_schedule.warmup
    return recipe.updated(train={"steps": steps}, lr_schedule={"warmup": warmup})


def find(path: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint `path`, or the newest complete one of the run in it; None if the run has none. Collective.

    warn: called with a message for each damaged checkpoint that is passed over.

    Raises CheckpointError if the named checkpoint is damaged, or all of the run are.
    """
    import torch.distributed as dist

    from vitpar.launch.world_group import broadcast_json

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
            warn(f"{error}: resuming from an older checkpoint")
    return None


def allowed_changes(
    checkpoint: Checkpoint, recipe: Recipe, task: Task, data: ImageSet, allowed: Collection[str]
) -> dict[str, str]:
    """Return the settings, and perhaps `data`, in which `recipe` differs from `checkpoint`, with each change in words.

    task: that of `recipe`, which matches the outputs of the checkpoint with the data.
    data: training set of `recipe`.

    Raises CheckpointError for any that changes the training and is not in `allowed`, and for classes in
    another order, which would train wrong outputs.
    """
    before = read_recipe(checkpoint.path / RECIPE)
    changed = changes(before, recipe)
    as_long = before.with_batch_size(recipe.train.batch_size)
    for key, number in as_long.flat().items():
        if key in changed and key != "train.batch_size" and number == recipe.flat()[key]:
            del changed[key]  # the same number of images
    if checkpoint.facts.data != data.fingerprint:
        changed[DATA] = "the training set differs"
    if checkpoint.facts.teacher != teacher_fingerprint(recipe):
        changed["distill.teacher"] = "the teacher differs"
    match = task.match(read_class_names(checkpoint.path), data)
    if match.kind in ("moved", "mixed"):
        raise CheckpointError(
            f"cannot resume '{checkpoint.path}': '{data.place}' has other classes, or the same in another order: train "
            f"on the former data, or start a new run with --weights {checkpoint.path}, which matches classes by name"
        )
    if match.kind == "other":
        changed[DATA] = match.words
    # A change of the optimizer changes its settings too.
    free = {*allowed, *(key for key in changed if key.startswith("optimizer.") and "optimizer.name" in allowed)}
    refused = {key: words for key, words in changed.items() if key not in free or _is_shape(key)}
    if refused:
        keys = " ".join(f"--allow-change {key}" for key in refused)
        instead = "" if any(map(_is_shape, refused)) else f", or resume with {keys}"
        raise CheckpointError(
            f"cannot resume '{checkpoint.path}': these settings changed: {'; '.join(refused.values())}: "
            f"change them back{instead}"
        )
    return differences(before, recipe) | changed


def teacher_fingerprint(recipe: Recipe) -> str | None:
    """Return the fingerprint of the teacher's weights; None without one. Raises DataError."""
    if recipe.distill.teacher is None:
        return None
    from vitpar.weights.folder import fingerprint

    return fingerprint(weights_folder(Path(recipe.distill.teacher)))


def _is_shape(key: str) -> bool:
    """Return whether a setting determines the parameters and their shapes. A change of it makes resuming impossible."""
    no_shapes = ("model.dropout", "model.drop_path", "model.init", "model.name", "model.norm_eps", "model.weights")
    return key in ("lora.rank", "lora.targets") or (key.startswith("model.") and key not in no_shapes)


def differences(before: Recipe, after: Recipe) -> dict[str, str]:
    """Return the settings in which two recipes differ, by key, with a description of each change."""
    old, new = before.flat(), after.flat()
    different = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    words = {key: ["not set" if side.get(key) is None else side[key] for side in (old, new)] for key in different}
    return {key: f"{key} was {was} and is {now}" for key, (was, now) in words.items()}


def changes(before: Recipe, after: Recipe) -> dict[str, str]:
    """Return the `differences` of two recipes that would train differently."""
    every = differences(before, after).items()
    return {key: words for key, words in every if key not in FREE and f"{key.partition('.')[0]}.…" not in FREE}
