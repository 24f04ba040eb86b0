"""`vitpar data`: pack images or text into shards, index and verify shards, and describe their content."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vitpar.data.shards.index import Labels, index
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.shards.verify import verify
from vitpar.data.sources.source import read_class_names
from vitpar.data.survey import survey
from vitpar.errors import DataError
from vitpar.launch.resources import cpu_cores
from vitpar.recipe.request import RecipeRequest
from vitpar.tasks.data import write_preview
from vitpar.terminal import say
from vitpar.text import count, printable
from vitpar_cli.data_pack import pack_command, packing_progress
from vitpar_cli.data_view import Workers, print_survey, refuse_options
from vitpar_cli.outputs import print_json, refuse_unwritable
from vitpar_cli.recipe_options import AsJson, Assignments, RecipeFile

ABOUT = "Pack images or text into shards, index and verify shards, and say what they hold."
EXAMPLE = "Example: vitpar data pack digits data_shards/digits"
app = typer.Typer(no_args_is_help=True, help=f"{ABOUT}\n\n{EXAMPLE}", short_help=ABOUT)
app.command("pack")(pack_command)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder with shards and their index.")]
SPLIT = "Files of a split, such as train=imagenet-*.tar; repeatable.  \\[default: by train, val and test in file names]"
LABEL = "Source of labels: .cls or .json files of the images, or folders."


@app.command("index")
def index_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with the .tar files.")],
    split: list[str] | None = typer.Option(None, metavar="NAME=PATTERN", help=SPLIT),
    label: str = typer.Option("cls", metavar="cls|json:FIELD|folder", help=LABEL),
    classes: Path | None = typer.Option(None, metavar="FILE", help="Class names, one per line, in label order."),
    workers: Workers = None,
) -> None:
    """Write an index into a folder of existing WebDataset shards, which are not changed.

    Example: vitpar data index data_shards/imagenet-wds --label json:class
    """
    labels = Labels.parse(label)
    pairs = [text.partition("=") for text in split or ()]
    if (wrong := next((pair for pair in pairs if not all(pair)), None)) is not None:
        raise DataError(f"'{''.join(wrong)}' is not a split: write NAME=PATTERN, such as train=imagenet-*.tar")
    names = None if classes is None else read_class_names(classes)
    splits = {name: pattern for name, _, pattern in pairs} or None
    with packing_progress() as progress:
        index(folder, splits=splits, labels=labels, classes=names, workers=workers or cpu_cores(), progress=progress)
    print_survey(folder)


@app.command("verify")
def verify_command(
    folder: Folder,
    pixels: bool = typer.Option(True, "--pixels/--no-pixels", help="Also decode every image."),
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Read a data set completely and print every damaged shard and sample.

    Reports each shard that is no sound tar file, and each sample that differs from its index or cannot be decoded.
    Exits with 1 if there are any.

    Example: vitpar data verify data_shards/digits
    """
    with packing_progress() as progress:
        problems = list(verify(folder, pixels=pixels, workers=workers or cpu_cores(), progress=progress))
    if as_json:
        print_json({"folder": str(folder), "bad": [asdict(problem) for problem in problems]})
    else:
        for problem in problems:
            number = "" if problem.sample is None else f"{problem.sample:,} "
            say(printable(f"{problem.split} {number}{problem.name}: {problem.what}"))
        typer.echo(f"{count(len(problems), 'problem')} in '{folder}'" if problems else f"'{folder}' is complete")
    if problems:
        raise typer.Exit(1)


@app.command("info")
def info_command(
    folder: Folder,
    as_json: AsJson = False,
    preview: Path | None = typer.Option(
        None, "--preview", metavar="FILE.png", help="Draw samples as the recipe augments them."
    ),
    recipe: RecipeFile = None,
    assignments: Assignments = None,
) -> None:
    """Show the content of a data set: splits, samples, shards, bytes, image sizes and classes.

    Of text: documents, sequences, tokens, their mean number, and the first sequences of each split.

    Example: vitpar data info data_shards/digits --preview digits.png --set augment.policy=rand-m9-n2
    """
    given = {"preview": preview, "recipe": recipe, "set": assignments or None}
    given = {name: value for name, value in given.items() if value is not None}
    if read_manifest(folder).text is not None:  # refuses before torch is imported, which takes seconds
        refuse_options(given, [*given], f"is for images, but '{folder}' holds text: leave it out")
    if given and preview is None:
        raise DataError("--recipe and --set do nothing without --preview: add --preview FILE.png, or leave them out")
    refuse_unwritable(preview)
    content = survey(folder)
    if preview is not None:
        request = RecipeRequest(recipe, {"data.path": str(folder)}, assignments or ())
        write_preview(request.read_with_defaults().recipe, preview)
    if as_json:
        print_json(content)
        return
    print_survey(folder, content)
    if preview is not None:
        typer.echo(f"written    {preview}")
