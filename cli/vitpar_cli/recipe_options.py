"""Options that several commands share, and the recipe that they define."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from annotated_types import Ge

from vitpar.recipe.file import SECTIONS
from vitpar.recipe.request import RecipeRequest

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

    flags, option: as for `typer.Option`; by default the flag, the help and the minimum are those of the setting.
    to: function from the option's value to the setting's value, or to None to leave the setting unchanged.
    """
    section, _, name = key.partition(".")
    field = SECTIONS[section].model_fields[name]
    known: dict[str, Any] = {"help": " ".join((field.description or "").split()).replace("[", "\\[")}
    if field.annotation in (int, int | None):
        known["min"] = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
    flags = flags or (f"--{name.replace('_', '-')}",)
    declared = typer.Option(*flags, rich_help_panel=PANELS.get(section), **known | option)
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


def request(
    command: Callable[..., None], arguments: Mapping[str, object], further: Mapping[str, object] = {}
) -> RecipeRequest:
    """Return the request for a recipe that the options of `command` make, after refusing what cannot be used.

    arguments: as for `settings`. The options --recipe and --set are the arguments `recipe` and `assignments`.
    further: settings that other arguments give, by dotted key.

    Raises StrategyError, DataError and RecipeError.
    """
    path, assignments = arguments.get("recipe"), arguments.get("assignments")
    assert path is None or isinstance(path, Path)
    assert assignments is None or isinstance(assignments, list)
    asked = RecipeRequest(path, {**settings(command, arguments), **further}, tuple(assignments or ()))
    asked.refuse_early()
    return asked


def words(asked: RecipeRequest, without: Collection[str] = ()) -> list[str]:
    """Return the options of `vitpar train` for the recipe of a request.

    without: settings to leave out, by dotted key.
    """
    flags = {"task.name": "--task", "model.name": "--model", "model.weights": "--weights", "data.path": "--data"}
    flags["train.epochs"] = "--epochs"
    given = {key: value for key, value in asked.given.items() if value is not None and key not in without}
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in given.items()}
    options = [word for key, text in texts.items() if key in flags for word in (flags[key], text)]
    others = [f"{key}={json.dumps(value)}" for key, value in given.items() if key not in flags]
    sets = [word for text in (*others, *asked.assignments) for word in ("--set", text)]
    return [*(["--recipe", str(asked.path)] if asked.path else []), *options, *sets]


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
    setting("data.path", "--data", to=str, metavar="DIR", help="Images or text: a folder made by `vitpar data pack`."),
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
        help="A name that `vitpar models` lists, such as vit_small_patch16_224, mae_vit_base or bert_base, whose sizes "
        "replace the recipe's; or a model of your own as FILE.py:NAME, whose file is run.",
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


CheckpointDir = Annotated[
    Path, typer.Option("--checkpoint", metavar="DIR", help="A run, saved weights or a checkpoint; or hf:OWNER/NAME.")
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
        help="classify, mae (masked autoencoding), mlm (BERT) or span (T5) on text, or a task of your own as "
        "FILE.py:NAME, whose file is run.  \\[default: classify]",
        callback=own_task,
    ),
]
WeightsDir = Annotated[
    Path | None,
    setting(
        "model.weights",
        "--weights",
        to=str,
        metavar="DIR",
        help="Start from these parameters: weights of `vitpar checkpoint import` or of a run, a checkpoint, or "
        "hf:OWNER/NAME\\[@REVISION] on the Hugging Face hub. Without --model and --recipe they bring their recipe.",
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
BatchSize = Annotated[int | None, setting("train.batch_size")]
Microbatches = Annotated[int | None, setting("parallel.microbatches")]
MicrobatchSize = Annotated[int | None, setting("parallel.microbatch_size")]
Schedule = Annotated[str | None, setting("parallel.schedule", metavar="NAME")]
VirtualStages = Annotated[int | None, setting("parallel.virtual_stages")]
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
