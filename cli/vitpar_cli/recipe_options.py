"""Options that several commands share, and the recipe they make together."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from vitpar.errors import RecipeError, shown
from vitpar.strategy import SCHEDULES
from vitpar.training.recipe import DEFAULT_RECIPE, Recipe, read_recipe

RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", metavar="FILE", help="TOML recipe, such as experiments/digits.toml.  \\[default: digits]"),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="STRATEGY",
        help="Roles and degrees of the mesh's axes, such as pp2xtp2xdp2; by layers in quotes, as in "
        "'pp2: stem=fsdp4, \\*=tp2xfsdp2'; or a plan.json.",
    ),
]
DataDir = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Folder made by `vitpar data pack`.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="timm's name, such as vit_small_patch16_224; its sizes replace the recipe's."
    ),
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="Images of a step over all ranks.")]
Microbatches = Annotated[int | None, typer.Option("--microbatches", min=1, help="Micro-batches of a step.")]
MicrobatchSize = Annotated[
    int | None, typer.Option("--microbatch-size", min=1, help="Images of a micro-batch, instead.")
]
Schedule = Annotated[
    str | None, typer.Option("--schedule", metavar="NAME", help=f"Pipeline schedule: {', '.join(SCHEDULES)}.")
]
VirtualStages = Annotated[
    int | None,
    typer.Option(
        "--virtual-stages",
        min=1,
        help="Stages a rank holds: 2 or more with interleaved schedules, 2 with zbvzerobubble and dualpipev, else 1.",
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        "--split", metavar="HOW", help="Blocks to stages: even, balanced (by cost), or the blocks of each, as in 5,7."
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="fp64, fp32, bf16, fp16 or fp8.  \\[default: auto, bf16 on GPUs that have it, else fp32]",
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile each block: slow to start, faster steps.  \\[default: on GPUs, where that works]",
    ),
]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda.  \\[default: cuda where there is a GPU]")
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.SUB=VALUE", help="Any other recipe setting; may be repeated.")
]


def parse_split(text: str | None) -> str | list[int] | None:
    """``5,7`` as numbers; names as they are."""
    if text is not None and re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text):
        return [int(part) for part in text.split(",")]
    return text


def assigned(assignments: list[str] | None, key: str) -> bool:
    """Whether ``--set`` gives `key`."""
    return key in _keys(assignments)


def _keys(assignments: list[str] | None) -> list[str]:
    """Return the keys that ``--set`` gives."""
    return [assignment.partition("=")[0].strip() for assignment in assignments or ()]


def refuse_idle(assignments: list[str] | None, doing: str, used: Collection[str]) -> None:
    """Refuse ``--set`` of a setting that does nothing here. doing: what the command does. used: keys, or "section.…"
    for all of a section."""
    for assignment in assignments or ():
        key = assignment.partition("=")[0].strip()
        # Weights change no shape, plan or time, so only a training has a use for them.
        if key == "model.weights" or (key not in used and f"{key.partition('.')[0]}.…" not in used):
            raise RecipeError(
                f"--set {shown(key)} changes nothing in {doing}, which uses {', '.join(used)}: leave it out"
            )


def without_commands(recipe: Recipe, assignments: list[str] | None) -> Recipe:
    """A recipe that came with weights or a checkpoint: its stream runs commands only where --set allows it anew, since
    who was given them may not have read it."""
    said = any(text.partition("=")[0].strip() == "stream.allow_pipe" for text in assignments or ())
    if said or not recipe.stream.allow_pipe:
        return recipe
    return recipe.model_copy(update={"stream": recipe.stream.model_copy(update={"allow_pipe": False})})


def merged_recipe(
    path: Path | None,
    data: Path | None,
    assignments: list[str] | None,
    *,
    without: Collection[str] = (),
    **options: Any,
) -> Recipe:
    """The recipe of `path`, or the shipped digits recipe when neither a recipe nor data is named, with the options
    put in. without: sections of the file to leave out."""
    given = _given(data, options)
    if path is not None or data is not None:
        return read_recipe(path, given, assignments or (), without=without)
    # A model that is named beside no recipe is the published one, not one with the digits recipe's options.
    named = given.get("model.name") is not None
    return read_recipe(DEFAULT_RECIPE, given, assignments or (), without=("model",) if named else ())


def training_recipe(
    path: Path | None,
    data: Path | None,
    assignments: list[str] | None,
    *,
    without: Collection[str] = (),
    **options: Any,
) -> tuple[Recipe, int | None]:
    """Return the recipe of a training, and for how many images its defaults are (``vitpar.training.recipe.defaults``).

    Without a recipe file the defaults are the lowest layer where data is named; otherwise, and to begin with weights,
    the recipe is that of `merged_recipe` and the number None.
    """
    keys = _keys(assignments)
    named = data is not None or "data.path" in keys or any(key.startswith("stream.") for key in keys)
    if path is not None or not named:
        return merged_recipe(path, data, assignments, without=without, **options), None
    from vitpar.training.recipe.defaults import with_defaults

    given = _given(data, options)
    begun = read_recipe(None, given, assignments or (), needs_length=False)
    if begun.model.weights is not None:  # the table is for training from initial values
        return read_recipe(None, given, assignments or ()), None
    images = begun.stream.samples
    if images is None:
        from vitpar.training.input import open_split

        images = len(open_split(begun, "train"))
    return with_defaults(begun, images), images


def _given(data: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by dotted key."""
    given = {key.replace("__", "."): value for key, value in options.items()}
    given["data.path"] = None if data is None else str(data)
    return given
