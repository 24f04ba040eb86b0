"""Preparation of a run: everything that settings, data and plan decide, resolved and checked before its ranks start.

`prepare` is the only place that orders these checks. None of them needs torch, so a wrong setting is answered at once.
Commands that do not train use its parts: `on_device`, `choose_plan`, `open_data`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitpar.checkpoint import Checkpoint
from vitpar.copying import refuse_used
from vitpar.data.classes import NamedClasses
from vitpar.errors import CheckpointError, DataError, RecipeError
from vitpar.launch.resources import choose_device
from vitpar.launch.world import Device
from vitpar.models.config import ModelConfig
from vitpar.object_store import local
from vitpar.strategy import Plan
from vitpar.tasks import Task, task_of
from vitpar.tasks.data import open_data
from vitpar.tasks.image_data import ImageSet, check_images, order_of, refuse_streamed_targets
from vitpar.training.events import SettingsOrigin
from vitpar.training.ranks import choose_plan
from vitpar.training.recipe import Recipe, read_recipe
from vitpar.training.recipe.machine import on_device, refuse_huge_batch
from vitpar.training.recipe.recipe import Chosen
from vitpar.training.recipe.request import RecipeRequest
from vitpar.training.recipe.schedules import Schedules
from vitpar.training.recipe.sections import AUTO
from vitpar.training.run_folder import check_run_folder
from vitpar.training.saving.resume import (
    Resumed,
    allowed_changes,
    checkpoints_of,
    counting_images,
    is_checkpoint,
    resumed,
    same_run,
    weights_folder,
)
from vitpar.training.tracking.tracked_run import refuse_missing
from vitpar.weights.hub import hub_name


@dataclass(frozen=True)
class Prepared:
    """Run that is ready to start: every setting is resolved, and nothing in it is refused any more."""

    recipe: Recipe
    """Recipe with its precision resolved."""
    config: ModelConfig
    """Configuration of the model."""
    task: Task
    """Task that is trained."""
    plan: Plan
    """Plan, validated against model and batch, with known degrees."""
    train_set: ImageSet
    """Training set."""
    val_set: ImageSet | None = None
    """Validation set; None if the data have none."""
    device_type: Device = "cpu"
    """Kind of device that the ranks compute on."""
    because: str | None = None
    """Reason for the plan, as one sentence; None if it is the one that the recipe asks for first."""
    searched: bool = False
    """Whether the plan was searched. The reason is then a message, else a warning."""
    run_dir: Path | None = None
    """Folder of the run; None for a new one under runs/."""
    resume: Path | None = None
    """Checkpoint to resume from, or the folder of a run, whose newest complete checkpoint is used; a run without one
    starts from the beginning."""
    allow_change: Sequence[str] = ()
    """Settings that may differ from those of the checkpoint (``vitpar.training.saving.resume``)."""
    notes: Sequence[str] = ()
    """Further warnings to print at the start."""
    origin: SettingsOrigin = field(default_factory=SettingsOrigin)
    """Origin of settings, for the header."""

    @property
    def messages(self) -> list[str]:
        """Messages to print at the start."""
        return [self.because] if self.because and self.searched else []

    @property
    def warnings(self) -> list[str]:
        """Warnings to print at the start."""
        return [*([self.because] if self.because and not self.searched else []), *self.notes]


Choose = Callable[[Recipe, ModelConfig, Device, Path | None], Chosen]
"""Function that chooses the plan of a recipe for a model and a kind of device; the path is the recipe.toml of the run
to resume, None for a new run. Raises UserError."""


def prepare(
    request: Recipe | RecipeRequest,
    device: str | None = None,
    *,
    run_dir: Path | None = None,
    resume: str | None = None,
    allow_change: Sequence[str] = (),
    choose: Choose = choose_plan,
    fetch: Callable[[Path], Path] = Path,
) -> Prepared:
    """Return the run of a recipe, ready to start.

    device: cpu or cuda; None for CUDA if there is a GPU.
    run_dir: folder of the run; None for that of the run to resume, or a new one.
    resume: value of ``vitpar train --resume``: auto, a path or never.
    allow_change: settings that may differ from those of the checkpoint.
    choose: chooses the plan.
    fetch: returns the local folder of weights, or of a teacher, that `request` names, which may be on the hub.

    Raises UserError for everything that settings, data, plan, device and run folder rule out.
    """
    for folder in (run_dir, resume):
        if folder is not None:
            local(Path(folder))  # raises
    source = resumed(resume, run_dir)
    if source.source is None and allow_change:
        raise RecipeError(f"--allow-change {allow_change[0]} does nothing without --resume: leave it out")
    run_dir = run_dir or source.run
    recipe, images, opened = _recipe(request, source, fetch)
    recipe = counting_images(recipe, source)
    refuse_missing(recipe.track.trackers)
    device_type = choose_device(device)
    automatic = recipe.train.precision == "auto"
    if source.recipe is not None:  # a resumed run keeps its precision
        recipe = recipe.with_precision(read_recipe(source.recipe).train.precision)
    recipe = on_device(recipe, device_type)
    train_set, val_set = open_data(recipe, opened)
    if val_set is None and recipe.checkpoint.keep_best:
        raise RecipeError(
            f"checkpoint.keep_best needs evaluations, but '{train_set.place}' has no val split: set it to false, or "
            "pack the data with one"
        )
    task = task_of(recipe, train_set)
    config = recipe.config(task.outputs, task.model_options)
    task.refuse_model(config)
    if task.INPUT == "images":
        check_images(recipe, config.image_size, train_set)
    order_of(recipe, len(train_set))
    Schedules.of(recipe, len(train_set), config)  # refuses settings of a warm-up without one, and the like
    refuse_huge_batch(recipe, config)
    recipe = _with_teacher(recipe, fetch)
    searched = recipe.parallel.mesh == AUTO
    chosen = choose(recipe, config, device_type, source.recipe)
    refuse_streamed_targets(recipe, task, config, chosen.plan)
    refuse_teacher(recipe, config, chosen.plan, train_set)
    if searched:
        recipe = recipe.under(chosen.plan)
    if recipe.model.weights is not None and source.begins:
        from vitpar.training.begin import beginning

        beginning(recipe, config, task, train_set)
    if recipe.lora.weights is not None and source.begins:
        from vitpar.models.lora import LoRA
        from vitpar.weights.adapters import read_adapters

        assert isinstance(config, LoRA), "lora.weights needs lora.rank"
        read_adapters(Path(recipe.lora.weights), config)
    if checkpoint := _newest(source):  # files may be damaged: the run verifies them, and may choose an older one
        allowed_changes(checkpoint, recipe, task, train_set, allow_change)
    resuming = run_dir is not None and source.source is not None and same_run(run_dir, source.source)
    check_run_folder(run_dir, resuming)
    refuse_used(recipe.checkpoint.copy_to, resuming and not source.begins)
    return Prepared(
        recipe=recipe,
        config=config,
        task=task,
        plan=chosen.plan,
        train_set=train_set,
        val_set=val_set,
        device_type=device_type,
        because=chosen.because,
        searched=searched,
        run_dir=run_dir,
        resume=source.source,
        allow_change=tuple(allow_change),
        notes=_no_copies(recipe, source),
        origin=SettingsOrigin(images, automatic),
    )


def _no_copies(recipe: Recipe, source: Resumed) -> list[str]:
    """Return a warning if only the recipe that came with the run to resume copies it (``without_commands``)."""
    before = None if source.recipe is None else read_recipe(source.recipe).checkpoint.copy_to
    if before is None or recipe.checkpoint.copy_to is not None:
        return []
    return [f"checkpoints are no longer copied to '{before}': to go on, add --set checkpoint.copy_to={before}"]


def _with_teacher(recipe: Recipe, fetch: Callable[[Path], Path]) -> Recipe:
    """Return the recipe with the folder of its teacher's weights in place of a run or a name on the hub."""
    if recipe.distill.teacher is None:
        return recipe
    folder = weights_folder(fetch(Path(recipe.distill.teacher)))
    return recipe.model_copy(update={"distill": recipe.distill.model_copy(update={"teacher": str(folder)})})


def refuse_teacher(recipe: Recipe, config: ModelConfig, plan: Plan, data: NamedClasses | None) -> None:
    """Raise UserError for a teacher that does not fit, as ``vitpar.training.teacher.teacher_of`` does."""
    if recipe.distill.teacher is not None:
        from vitpar.training.teacher import teacher_of

        teacher_of(recipe, config, plan, data)


def _recipe(
    request: Recipe | RecipeRequest, source: Resumed, fetch: Callable[[Path], Path]
) -> tuple[Recipe, int | None, ImageSet | None]:
    """Return the recipe of a run, the number of images that its defaults are for, and the training set if it is open.

    Without a recipe of its own, a request gets that of the run to resume, or of the weights to begin with.
    """
    if isinstance(request, Recipe):
        return request, None, None
    weights, mesh = request.value("model.weights"), request.value("parallel.mesh")
    path, without, foreign = request.path, list[str](), False
    if path is None and source.recipe is not None:
        path, foreign = source.recipe, True
        if mesh is None:
            request |= {"parallel.mesh": source.mesh()}
        else:  # another mesh replaces the complete plan of the resumed run
            without = ["parallel", "communication"]
    elif mesh == AUTO:
        without = ["parallel"]
    if weights is not None and source.begins:
        folder = fetch(Path(str(weights)))
        if not folder.is_dir():
            raise DataError(f"--weights '{folder}' does not exist: name a folder of weights, or hf:OWNER/NAME")
        request |= {"model.weights": str(folder)}
        if path is None and request.value("model.name") is None and (folder / "recipe.toml").is_file():
            path, foreign = folder / "recipe.toml", True
            without = ["parallel", "communication", "track"]  # the plan of another run is not this one's
    elif weights is not None and hub_name(str(weights)) and source.recipe is not None:
        request |= {"model.weights": read_recipe(source.recipe).model.weights}  # they are in the checkpoint
    request = replace(request, path=path)
    recipe, images, opened = request.read_with_defaults(without)
    return request.without_commands(recipe) if foreign else recipe, images, opened


def _newest(source: Resumed) -> Checkpoint | None:
    """Return the checkpoint that a run resumes from, with its files unverified; None if there is none to read."""
    path = source.source
    if path is None or source.begins:
        return None
    if not is_checkpoint(path):
        there = checkpoints_of(path)
        path = there.path(there.steps()[-1])
    with suppress(CheckpointError):
        return Checkpoint.open(path)
    return None
