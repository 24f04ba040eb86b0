"""Preparation of a run: everything that settings, data and plan decide, resolved and checked before its ranks start.

`prepare` is the only place that orders these checks. Commands that do not train use its parts: `on_device`,
`choose_plan`, `open_data`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitpar.checkpoint.folder import Checkpoint
from vitpar.copying import refuse_used
from vitpar.data.stream.stream_set import ImageSet
from vitpar.errors import CheckpointError, DataError, RecipeError
from vitpar.launch.resources import choose_device
from vitpar.launch.world import Device
from vitpar.models.config import ModelConfig
from vitpar.object_store import local
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.effects import without_idle
from vitpar.recipe.machine import choose_plan, on_device, refuse_huge_batch
from vitpar.recipe.rates.schedules import Schedules
from vitpar.recipe.recipe import Chosen
from vitpar.recipe.request import Merged, RecipeRequest
from vitpar.recipe.sections.input import ModelSection
from vitpar.recipe.sections.running import AUTO, refuse_missing
from vitpar.strategy import Plan
from vitpar.tasks import Task, task_of
from vitpar.tasks.data import check_images, open_data, refuse_streamed_targets
from vitpar.tasks.known import model_for
from vitpar.training.events import SettingsOrigin
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
from vitpar.weights.hub import hub_name

OF_ANOTHER_RUN = ["parallel", "communication", "track"]
"""Sections of the recipe of weights that a run which begins with them does not take."""


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
    reason: str | None = None
    """Reason for a plan that was searched, as one sentence; None for another one."""
    run_dir: Path | None = None
    """Folder of the run; None for a new one under runs/."""
    resume: Path | None = None
    """Checkpoint to resume from, or the folder of a run, whose newest complete checkpoint is used; a run without one
    starts from the beginning."""
    allow_change: Sequence[str] = ()
    """Settings that may differ from those of the checkpoint (``vitpar.training.saving.resume``)."""
    warnings: Sequence[str] = ()
    """Further warnings to print at the start."""
    hints: Sequence[str] = ()
    """Further messages to print at the start."""
    origin: SettingsOrigin = field(default_factory=SettingsOrigin)
    """Origin of settings, for the header."""


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
    merged = _recipe(request, source, fetch)
    recipe = counting_images(merged.recipe, source)
    refuse_missing(recipe.track.trackers)
    device_type = choose_device(device)
    automatic = recipe.train.precision == "auto"
    if source.before is not None:  # a resumed run keeps its precision
        recipe = recipe.with_precision(source.before.train.precision)
    recipe = on_device(recipe, device_type)
    train_set, val_set = open_data(recipe, merged.opened)
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
    Schedules.of(recipe, len(train_set), config)  # refuses what does not fit the length of the run or the model
    refuse_huge_batch(recipe, config)
    if recipe.distill.teacher is not None:  # a run or a name on the hub becomes the folder of its weights
        recipe = recipe.updated(distill={"teacher": str(weights_folder(fetch(Path(recipe.distill.teacher))))})
    searched = recipe.parallel.mesh == AUTO
    chosen = choose(recipe, config, device_type, source.recipe)
    recipe, idle = without_idle(recipe, chosen.plan)
    refuse_streamed_targets(recipe, task, config, chosen.plan)
    refuse_misfits(task, recipe, config, chosen.plan, train_set)
    if searched:
        recipe = recipe.under(chosen.plan)
    hints = [*merged.hints]
    if recipe.model.weights is not None and source.begins:
        from vitpar.training.begin import beginning

        beginning(recipe, config, task, train_set)
        if config.pretrained is not None and isinstance(request, RecipeRequest) and not request.given.get("task.name"):
            hints.append(f"these weights continue task '{recipe.task.name}': to fine-tune them, add --task classify")
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
    warnings = [*([chosen.because] if chosen.because and not searched else []), *idle]
    copied = source.before and source.before.checkpoint.copy_to
    if copied is not None and recipe.checkpoint.copy_to is None:  # by the recipe that came with the run alone
        warnings.append(
            f"checkpoints are no longer copied to '{copied}': to go on, add --set checkpoint.copy_to={copied}"
        )
    return Prepared(
        recipe=recipe,
        config=config,
        task=task,
        plan=chosen.plan,
        train_set=train_set,
        val_set=val_set,
        device_type=device_type,
        reason=chosen.because if searched else None,
        run_dir=run_dir,
        resume=source.source,
        allow_change=tuple(allow_change),
        warnings=warnings,
        hints=hints,
        origin=SettingsOrigin(merged.samples, automatic),
    )


def refuse_misfits(task: Task | None, recipe: Recipe, config: ModelConfig, plan: Plan, data: ImageSet | None) -> None:
    """Raise UserError for a task, None if it is unknown, or a teacher that the plan does not fit."""
    if task is not None:
        task.refuse_plan(config, plan, recipe.train.batch_size)
    if recipe.distill.teacher is not None:
        from vitpar.training.teacher import teacher_of

        teacher_of(recipe, config, plan, data)


def with_weights(request: RecipeRequest, fetch: Callable[[Path], Path] = Path) -> tuple[RecipeRequest, bool]:
    """Return the request for a model that begins with `model.weights`, and whether its recipe came with them.

    A request without recipe and model gets those of the weights. For another task than theirs it gets the model with
    which that task continues (``Task.model_for``), or the one that pretraining was for, as a masked autoencoder's
    encoder.

    fetch: returns the local folder of weights, which may be on the hub.

    Raises DataError and RecipeError.
    """
    folder = weights_folder(fetch(Path(str(request.given.get("model.weights")))))
    if not folder.is_dir():
        raise DataError(f"--weights '{folder}' does not exist: name a folder of weights, or hf:OWNER/NAME")
    request |= {"model.weights": str(folder)}
    file, task = folder / "recipe.toml", request.given.get("task.name")
    if request.path is not None or request.given.get("model.name") is not None or not file.is_file():
        return request, False
    saved = read_recipe(file, {"data.path": "unused"}, needs_length=False)
    made = None
    if task not in (None, saved.task.name):
        there = saved.config(1)
        made = model_for(str(task), there) or (None if there.pretrained is None else there.pretrained[0])
    if made is None:
        return replace(request, path=file), True
    from vitpar.weights.importing import model_section

    known = ModelSection.model_fields
    theirs: dict[str, object] = {
        f"model.{name}" if name in known else f"model.options.{name}": value
        for name, value in model_section(made).items()
    }
    theirs |= {"data.mean": saved.data.mean, "data.std": saved.data.std}
    given = {key: value for key, value in request.given.items() if value is not None}
    return replace(request, given=theirs | given), False


def _recipe(request: Recipe | RecipeRequest, source: Resumed, fetch: Callable[[Path], Path]) -> Merged:
    """Return the recipe of a run: the request's, else that of the run to resume or of the weights to begin with."""
    if isinstance(request, Recipe):
        return Merged(request)
    weights, mesh = request.given.get("model.weights"), request.given.get("parallel.mesh")
    without, foreign = list[str](), False
    if request.path is None and source.recipe is not None:
        request, foreign = replace(request, path=source.recipe), True
        if mesh is None:
            request |= {"parallel.mesh": source.mesh()}
        else:  # another mesh replaces the complete plan of the resumed run
            without = ["parallel", "communication"]
    elif mesh == AUTO:
        without = ["parallel"]
    if weights is not None and source.begins:
        request, came = with_weights(request, fetch)
        if came:
            foreign, without = True, OF_ANOTHER_RUN
    elif weights is not None and hub_name(str(weights)) and source.before is not None:
        request |= {"model.weights": source.before.model.weights}  # they are in the checkpoint
    merged = request.read_with_defaults(without)
    return replace(merged, recipe=request.without_commands(merged.recipe)) if foreign else merged


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
