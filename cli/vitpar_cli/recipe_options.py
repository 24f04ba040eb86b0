"""Options that several commands share, and the recipe that they define."""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from vitpar.errors import RecipeError
from vitpar.strategy import SCHEDULES, parse
from vitpar.text import shown
from vitpar.training.recipe import DEFAULT_RECIPE, Recipe, read_recipe
from vitpar.training.recipe.effects import COMMANDS
from vitpar.training.recipe.file import refuse_unknown_key
from vitpar.training.recipe.sections import AUTO
from vitpar.training.tracking.tracked_run import refuse_missing
from vitpar_cli.world import Device, handed_plan, resolve

if TYPE_CHECKING:
    from vitpar.models import ModelConfig
    from vitpar.training.recipe.recipe import Chosen


NO_DATA = {"data.path": "unused", "train.steps": 1}
"""Values of the settings that every recipe must have, for commands that neither read data nor train."""

PANELS = {
    "task": "Model and data",
    "model": "Model and data",
    "data": "Model and data",
    "train": "Training",
    "parallel": "Plan",
}
"""Heading in `--help` for options that give settings of a recipe's section; the others are under Options."""


def parse_split(text: str) -> str | list[int]:
    """Return numbers such as ``5,7`` as a list, and other text unchanged."""
    return [int(part) for part in text.split(",")] if re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text) else text


def setting(key: str, *flags: str, to: Callable[[Any], object] = lambda given: given, **option: Any) -> Any:
    """Return an option that gives the recipe's setting `key`, for use in ``Annotated``.

    flags, option: as for `typer.Option`.
    to: function from the option's value to the setting's value, or to None to leave the setting unchanged.
    """
    declared = typer.Option(*flags, rich_help_panel=PANELS.get(key.partition(".")[0]), **option)
    declared.setting = key, to
    return declared


def settings(command: Callable[..., None], arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that the options of `command` give, by dotted key; None for options that are left out.

    arguments: arguments of the call, which ``locals()`` returns in the first line of the command.
    """
    values: dict[str, object] = {}
    for name, annotation in get_type_hints(command, include_extras=True).items():
        for option in getattr(annotation, "__metadata__", ()):
            if hasattr(option, "setting"):
                key, to = option.setting
                values[key] = None if arguments[name] is None else to(arguments[name])
    return values


def refuse_early(given: Mapping[str, object]) -> None:
    """Refuse a strategy, data set or tracker that cannot be used, before torch is imported, which takes seconds.

    given: settings by dotted key. Raises StrategyError, DataError and RecipeError.
    """
    mesh, data = given.get("parallel.mesh"), given.get("data.path")
    if isinstance(mesh, str) and mesh != AUTO and not mesh.endswith(".json"):
        parse(mesh)
    trackers = given.get("track.trackers")
    if isinstance(trackers, tuple):
        refuse_missing(trackers)
    if isinstance(data, str):
        from vitpar.data.shards.manifest import MANIFEST, read_manifest

        if not (Path(data) / MANIFEST).exists():
            read_manifest(data)


def refuse_missing_data(path: Path | None, given: Mapping[str, object], assignments: list[str] | None) -> None:
    """Refuse data that only the recipe names and that do not exist, before torch is imported.

    Raises DataError, and RecipeError for a recipe that cannot be read.
    """
    if not names_data(given, assignments):
        without = ("parallel",) * (given.get("parallel.mesh") == AUTO)
        refuse_early({"data.path": merged_recipe(path, given, assignments, without=without).data.path})


def checked_settings(command: Callable[..., None], arguments: Mapping[str, object]) -> dict[str, object]:
    """Return `settings` after `refuse_early`."""
    values = settings(command, arguments)
    refuse_early(values)
    return values


RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", metavar="FILE", help="TOML recipe, or the name of a shipped one.  \\[default: digits]"),
]
Mesh = Annotated[
    str | None,
    setting(
        "parallel.mesh",
        "--mesh",
        metavar="STRATEGY",
        help="Roles and degrees of the mesh's axes, such as pp2xtp2xdp2; by layers in quotes, as in "
        "'pp2: embed=fsdp4, \\*=tp2xfsdp2'; or a plan.json.",
    ),
]
DataDir = Annotated[
    Path | None,
    setting("data.path", "--data", to=str, metavar="DIR", help="Folder made by `vitpar data pack`."),
]


def own_model(name: str | None) -> str | None:
    """Return the name of the model, after loading it if it is the user's own.

    Raises ModelError for a file that fails.
    """
    if name is None or ".py:" not in name:
        return name
    from vitpar.models.own import load

    return load(name)


ModelName = Annotated[
    str | None,
    setting(
        "model.name",
        "--model",
        metavar="NAME",
        help="timm model name, such as vit_small_patch16_224, whose sizes replace the recipe's; or a model of your own "
        "as FILE.py:NAME, whose file is run.",
        callback=own_model,
    ),
]
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FILE.py:NAME",
        help="The model, if it is one of your own; the file is run.",
        callback=own_model,
    ),
]


def own_task(name: str | None) -> str | None:
    """Return the name of the task, after loading it if it is the user's own.

    Raises RecipeError for a file that fails.
    """
    if name is None or ".py:" not in name:
        return name
    from vitpar.tasks import load

    return load(name)


TaskName = Annotated[
    str | None,
    setting(
        "task.name",
        "--task",
        metavar="NAME",
        help="classify, or a task of your own as FILE.py:NAME, whose file is run.  \\[default: classify]",
        callback=own_task,
    ),
]
OwnTask = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="FILE.py:NAME",
        help="The task, if it is one of your own; the file is run.",
        callback=own_task,
    ),
]
Epochs = Annotated[float | None, setting("train.epochs", "--epochs", help="Passes over the training set.")]
BatchSize = Annotated[
    int | None,
    setting("train.batch_size", "--batch-size", min=1, help="Global batch size: images per step over all ranks."),
]
Microbatches = Annotated[
    int | None, setting("parallel.microbatches", "--microbatches", min=1, help="Micro-batches per step.")
]
MicrobatchSize = Annotated[
    int | None,
    setting(
        "parallel.microbatch_size",
        "--microbatch-size",
        min=1,
        help="Images per micro-batch, instead of --microbatches.",
    ),
]
Schedule = Annotated[
    str | None,
    setting("parallel.schedule", "--schedule", metavar="NAME", help=f"Pipeline schedule: {', '.join(SCHEDULES)}."),
]
VirtualStages = Annotated[
    int | None,
    setting(
        "parallel.virtual_stages",
        "--virtual-stages",
        min=1,
        help="Stages per rank: 2 or more with interleaved schedules, 2 with zbvzerobubble and dualpipev, else 1.",
    ),
]
Split = Annotated[
    str | None,
    setting(
        "parallel.split",
        "--split",
        to=parse_split,
        metavar="HOW",
        help="Blocks per stage: even, balanced (by cost), or a list such as 5,7.",
    ),
]
Precision = Annotated[
    str | None,
    setting(
        "train.precision",
        "--precision",
        metavar="NAME",
        help="fp64, fp32, bf16, fp16 or fp8.  \\[default: auto, bf16 on GPUs that have it, else fp32]",
    ),
]
Compile = Annotated[
    bool | None,
    setting(
        "train.compile",
        "--compile/--no-compile",
        help="Compile each block: slow to start, faster steps.  \\[default: on GPUs, where that works]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="cpu or cuda.  \\[default: cuda if there is a GPU]")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.SUB=VALUE", help="Any other recipe setting; may be repeated.")
]


def assigned(assignments: list[str] | None, key: str) -> bool:
    """Return whether ``--set`` gives the setting `key`."""
    return key in _keys(assignments)


def _keys(assignments: list[str] | None) -> list[str]:
    """Return the keys of all settings that ``--set`` gives."""
    return [assignment.partition("=")[0].strip() for assignment in assignments or ()]


def refuse_idle(assignments: list[str] | None, doing: str) -> None:
    """Raise RecipeError if ``--set`` gives a setting that has no effect on a command.

    doing: kind of command, a key of ``COMMANDS``.
    """
    used = COMMANDS[doing]
    for key in _keys(assignments):
        refuse_unknown_key(key)
        # Weights change no shape, plan or time, so only training uses them.
        if key == "model.weights" or (key not in used and f"{key.partition('.')[0]}.…" not in used):
            raise RecipeError(
                f"--set {shown(key)} changes nothing in {doing}, which uses {', '.join(used)}: leave it out"
            )


def without_commands(recipe: Recipe, assignments: list[str] | None) -> Recipe:
    """Return a recipe with ``stream.allow_pipe`` off, unless ``--set`` gives that setting.

    For a recipe that came with weights or a checkpoint: the user may not have read it, so its URLs may run commands
    only with the user's new consent.
    """
    if assigned(assignments, "stream.allow_pipe") or not recipe.stream.allow_pipe:
        return recipe
    return recipe.model_copy(update={"stream": recipe.stream.model_copy(update={"allow_pipe": False})})


def merged_recipe(
    path: Path | None,
    given: Mapping[str, object],
    assignments: list[str] | None,
    *,
    without: Collection[str] = (),
) -> Recipe:
    """Return a recipe with the settings `given` and `assignments` applied.

    path: recipe file. If it is None and `given` has no data, the recipe is the shipped digits recipe.
    given: settings by dotted key.
    without: sections of the file to leave out.

    Raises RecipeError.
    """
    if path is not None or given.get("data.path") is not None:
        return read_recipe(path, given, assignments or (), without=without)
    # A model that is named without a recipe is the published one, so it must not get the digits recipe's options.
    named = given.get("model.name") is not None
    return read_recipe(DEFAULT_RECIPE, given, assignments or (), without=("model",) if named else ())


def classes_of(recipe: Recipe, given: int | None, default: int) -> int:
    """Return `given`, else the number of classes of the recipe's data if they can be found, else `default`."""
    from vitpar.data.shards.manifest import MANIFEST, read_manifest

    path = recipe.data.path
    if given is None and path is not None and (Path(path) / MANIFEST).is_file():
        return len(read_manifest(path).classes)
    return given or recipe.stream.classes or default


def training_recipe(
    path: Path | None,
    given: Mapping[str, object],
    assignments: list[str] | None,
    *,
    without: Collection[str] = (),
) -> tuple[Recipe, int | None]:
    """Return the recipe of a training run and the number of images that its defaults are for.

    If data is named without a recipe file, defaults for that number of images (``vitpar.training.recipe.defaults``)
    fill the settings that are not given. Otherwise the recipe is that of `merged_recipe`, and the number is None. A run
    that begins with weights does not use those defaults either.

    Raises RecipeError and DataError.
    """
    if path is not None or not names_data(given, assignments):
        return merged_recipe(path, given, assignments, without=without), None
    from vitpar.training.recipe.defaults import with_defaults

    begun = read_recipe(None, given, assignments or (), needs_length=False)
    if begun.model.weights is not None:  # the defaults are for training from scratch
        return read_recipe(None, given, assignments or ()), None
    if begun.data.path is None:
        streamed = begun.stream.samples
        assert streamed is not None, "the recipe has checked it"
        return with_defaults(begun, streamed), streamed
    from vitpar.data.shards.shard_set import ShardSet
    from vitpar.data.survey import shorter_side

    shards = ShardSet.open(begun.data.path, "train")
    # Images are opened only to choose a model.
    side = None if "name" in begun.model.model_fields_set else shorter_side(shards)
    return with_defaults(begun, len(shards), side), len(shards)


def names_data(given: Mapping[str, object], assignments: list[str] | None) -> bool:
    """Return whether options name data. given: settings by dotted key."""
    keys = [key for key, value in given.items() if value is not None] + _keys(assignments)
    return any(key == "data.path" or key.startswith("stream.") for key in keys)


def decide(recipe: Recipe, config: "ModelConfig", device: Device) -> "tuple[Recipe, Chosen]":
    """Return `recipe` adapted to a kind of device, and the plan for the available ranks.

    A rank that vitpar started uses the plan that the starting process passed to it.

    Raises RecipeError and StrategyError for settings that the device, ranks, model or batch do not allow.
    """
    from vitpar.training.recipe.machine import on_device

    recipe = on_device(recipe, device)
    return recipe, handed_plan() or recipe.chosen(config, lambda plan: resolve(plan, device))
