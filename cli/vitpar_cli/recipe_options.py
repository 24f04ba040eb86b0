"""Options that several commands share: those that give settings of a recipe, and those of other objects.

A command names the groups of options that it takes (`shared`), and gets what they make instead of their values.
"""

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from annotated_types import Ge

from vitpar import tasks
from vitpar.models import own
from vitpar.recipe.file import SECTIONS
from vitpar.recipe.request import RecipeRequest
from vitpar.recipe.sections.running import TrackerName
from vitpar.text import either

PANELS = {
    "task": "Model and data",
    "model": "Model and data",
    "data": "Model and data",
    "train": "Training",
    "parallel": "Plan",
}
"""Heading in `--help` for options that give settings of a recipe's section; the others are under Options."""


@dataclass(frozen=True)
class Group:
    """Options that several commands share."""

    options: Mapping[str, Any]
    """Annotation of each option's parameter, with the option in it."""
    make: Callable[..., object]
    """Function of the options' values by parameter, None for one that is left out, which makes what a command gets."""

    def helped(self, panel: str | None = None, /, **helps: str) -> "Group":
        """Return the group with other helps of some options, by parameter.

        panel: heading in `--help` of all options; None for those that they have.
        """
        assert helps.keys() <= self.options.keys(), f"there are no options {helps.keys() - self.options.keys()}"
        options = {}
        for name, annotation in self.options.items():
            kind, option = get_args(annotation)
            option = copy(option)
            option.help, option.rich_help_panel = helps.get(name, option.help), panel or option.rich_help_panel
            options[name] = Annotated[kind, option]
        return Group(options, self.make)


def shared(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command the options of groups.

    groups: by the parameter of the command that gets what the options make.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        options = {name: kind for group in groups.values() for name, kind in group.options.items()}
        keyword = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in options.items()]
        own = [one for name, one in inspect.signature(command).parameters.items() if name not in groups]
        parameters = [*added, *(one.replace(kind=keyword) for one in own)]

        def run(**arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in options}
            made = {
                parameter: group.make(**{name: values[name] for name in group.options})
                for parameter, group in groups.items()
            }
            command(**made, **arguments)

        update_wrapper(run, command)
        declared: Any = run
        declared.__signature__ = inspect.Signature(parameters)
        declared.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorated


def parse_split(text: str) -> str | list[int]:
    """Return numbers such as ``5,7`` as a list, and other text unchanged."""
    return [int(part) for part in text.split(",")] if re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text) else text


def setting(kind: Any, key: str, *flags: str, to: Callable[[Any], object] = lambda given: given, **option: Any) -> Any:
    """Return the annotation of an option that gives the recipe's setting `key`.

    kind: type of the option's value.
    flags, option: as for `typer.Option`; by default the flag, the help and the minimum are those of the setting.
    to: function from the option's value to the setting's value, or to None to leave the setting unchanged.
    """
    section, _, name = key.partition(".")
    field = SECTIONS[section].model_fields[name]
    known: dict[str, Any] = {"help": " ".join((field.description or "").split()).replace("[", "\\[")}
    if field.annotation in (int, int | None):
        known["min"] = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
    declared = typer.Option(
        *(flags or (f"--{name.replace('_', '-')}",)), rich_help_panel=PANELS.get(section), **known | option
    )
    declared.setting = key, to
    return Annotated[kind | None, declared]


def _loading(load: Callable[[str], str]) -> Callable[[str | None], str | None]:
    """Return a callback that loads the user's own model or task, if a name is that of a file, and returns the name."""
    return lambda name: load(name) if name and ".py:" in name else name


own_model, own_task = _loading(own.load), _loading(tasks.load)


def _own(what: str, callback: Callable[[str | None], str | None]) -> Any:
    """Return the annotation of the option that loads the user's model or task, of a run that names it."""
    text = f"The {what}, if it is one of your own; the file is run."
    return Annotated[str | None, typer.Option(f"--{what}", metavar="FILE.py:NAME", help=text, callback=callback)]


RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", metavar="FILE", help="TOML recipe, or the name of a shipped one.  \\[default: digits]"),
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.SUB=VALUE", help="Any other recipe setting; may be repeated.")
]
OPTIONS: dict[str, Any] = {
    "recipe": RecipeFile,
    "assignments": Assignments,
    "mesh": setting(
        str,
        "parallel.mesh",
        metavar="STRATEGY",
        help="Roles and degrees of the mesh's axes, such as pp2xtp2xdp2; by layers in quotes, as in "
        "'pp2: embed=fsdp4, \\*=tp2xfsdp2'; or a plan.json.",
    ),
    "data": setting(
        Path,
        "data.path",
        "--data",
        to=str,
        metavar="DIR",
        help="Images or text: a folder made by `vitpar data pack`.",
    ),
    "model": setting(
        str,
        "model.name",
        "--model",
        metavar="NAME",
        help="A name that `vitpar models` lists, such as vit_small_patch16_224, mae_vit_base or bert_base, whose sizes "
        "replace the recipe's; or a model of your own as FILE.py:NAME, whose file is run.",
        callback=own_model,
    ),
    "own_model": _own("model", own_model),
    "task": setting(
        str,
        "task.name",
        "--task",
        metavar="NAME",
        help="classify, mae (masked autoencoding), mlm (BERT) or span (T5) on text, or a task of your own as "
        "FILE.py:NAME, whose file is run.  \\[default: classify]",
        callback=own_task,
    ),
    "own_task": _own("task", own_task),
    "weights": setting(
        Path,
        "model.weights",
        to=str,
        metavar="DIR",
        help="Start from these parameters: weights of `vitpar checkpoint import` or of a run, a checkpoint, or "
        "hf:OWNER/NAME\\[@REVISION] on the Hugging Face hub. Without --model and --recipe they bring their recipe.",
    ),
    "epochs": setting(float, "train.epochs", help="Passes over the training set."),
    "steps": setting(int, "train.steps", min=1, help="Updates, instead of epochs."),
    "batch_size": setting(int, "train.batch_size"),
    "microbatches": setting(int, "parallel.microbatches"),
    "microbatch_size": setting(int, "parallel.microbatch_size"),
    "schedule": setting(str, "parallel.schedule", metavar="NAME"),
    "virtual_stages": setting(int, "parallel.virtual_stages"),
    "split": setting(
        str,
        "parallel.split",
        to=parse_split,
        metavar="HOW",
        help="Blocks per stage: even, balanced (by cost), or a list such as 5,7.",
    ),
    "precision": setting(
        str,
        "train.precision",
        metavar="NAME",
        help="fp64, fp32, bf16, fp16 or fp8.  \\[default: auto, bf16 on GPUs that have it, else fp32]",
    ),
    "compile_blocks": setting(
        bool,
        "train.compile",
        "--compile/--no-compile",
        help="Compile each block: slow to start, faster steps.  \\[default: on GPUs, where that works]",
    ),
    "track": setting(
        list[str],
        "track.trackers",
        "--track",
        to=lambda names: tuple(names) or None,
        metavar="NAME",
        help=f"Tracker that gets what the run logs: {either(get_args(TrackerName))}; repeatable.",
    ),
    "debug_checks": setting(
        bool,
        "faults.debug_checks",
        "--debug-checks",
        to=lambda on: on or None,
        help="Check state, gradients and collectives, and compare replicas, at every step (slow).",
    ),
}
"""Annotation of the options that give a recipe, its settings, and the user's own classes, by parameter."""
SUBJECT = ("recipe", "assignments", "model", "task", "weights", "data")
"""Options that say what is trained."""
LAYOUT = ("microbatches", "microbatch_size", "schedule", "virtual_stages", "split")
"""Options of a plan besides its mesh."""


def recipe(*names: str, **helps: str) -> Group:
    """Return the group of options in `OPTIONS` that makes the request for a recipe.

    helps: other helps, by parameter.

    Making the request raises StrategyError, DataError and RecipeError for what cannot be used.
    """
    options = {name: OPTIONS[name] for name in names}

    def make(**values: Any) -> RecipeRequest:
        given: dict[str, object] = {}
        for name, annotation in options.items():
            if hasattr(option := annotation.__metadata__[0], "setting"):
                key, to = option.setting
                given[key] = None if values[name] is None else to(values[name])
        asked = RecipeRequest(values.get("recipe"), given, tuple(values.get("assignments") or ()))
        asked.refuse_early()
        return asked

    return Group(options, make).helped(**helps)


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


CheckpointDir = Annotated[
    Path, typer.Option("--checkpoint", metavar="DIR", help="A run, saved weights or a checkpoint; or hf:OWNER/NAME.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="cpu or cuda.  \\[default: cuda if there is a GPU]")]
