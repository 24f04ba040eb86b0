"""`vitpar predict`: predict image files with saved weights."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from vitpar.data.image_files import ImageFiles, NotedImages, expand_images
from vitpar.recipe.request import NO_DATA, RecipeRequest
from vitpar.text import printable, shown
from vitpar.training.saved_model import AT_ONCE, saved_model
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import data_table, local_weights, progress_bar, report_bad

Images = Annotated[
    list[Path],
    typer.Argument(metavar="IMAGE...", help="Image files; a folder stands for all images in it and its subfolders."),
]
AtOnce = Annotated[
    int | None, typer.Option("--batch-size", min=1, help=f"Images that are computed at a time.  \\[default: {AT_ONCE}]")
]


@o.shared(asked=o.recipe("assignments", "precision", "own_model", "own_task"))
def predict(
    asked: RecipeRequest,
    images: Images,
    checkpoint: o.CheckpointDir,
    top: int = typer.Option(
        5, "--top", min=1, help="Number of classes to print, the most probable first (classification)."
    ),
    batch_size: AtOnce = None,
    device: o.DeviceName = None,
    as_json: o.AsJson = False,
) -> None:
    """Print what a model predicts for images, on one device: for classification the most probable classes.

    Images are cropped, resized and normalised as `vitpar eval` does. Classes have the names that the training data
    had, or numbers. An image that cannot be read is reported, the others are predicted, and the exit code is 1.

    Example: vitpar predict photos/cat.jpg photos/dogs --checkpoint runs/mine
    """
    asked |= NO_DATA
    paths = expand_images(images)
    source = NotedImages(ImageFiles(paths))
    saved = saved_model(checkpoint, asked, doing="a prediction", fetch=local_weights)
    names = saved.class_names()
    with saved.on_device(min(len(paths), batch_size or AT_ONCE), device) as (built, inputs):
        from vitpar.training.inference import answers

        with progress_bar("predicting") as progress:
            rows = answers(built, inputs, source, top, names, progress)
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(saved.folder), "images": rows}))
    elif any("error" not in row for row in rows):
        _print_table(rows)
    raise typer.Exit(report_bad(source.problems))


def _print_table(predicted: Iterable[dict[str, Any]]) -> None:
    """Print a table with a row for each image and answer. Names come from strangers, so nothing in them is markup."""
    rows = [
        (row["image"] if place == 0 else "", _cells(one))
        for row in predicted
        for place, one in enumerate(row.get("classes") or row.get("predictions") or ())
    ]
    table = data_table("image", *rows[0][1])
    table.columns[0].overflow = "fold"
    for column, (_, right) in zip(table.columns[1:], rows[0][1].values(), strict=True):
        column.overflow = "fold"
        if right:
            column.justify, column.no_wrap = "right", True
    for path, cells in rows:
        table.add_row(Text(printable(path)), *(Text(printable(text)) for text, _ in cells.values()))
    Console().print(table)


def _cells(answer: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Return the cells of an answer by column: the text, and whether it is a number.

    A class has its name, or its number if it has none.
    """
    if "class" in answer:
        name = str(answer["class"]) if answer["name"] is None else shown(answer["name"])
        share = f"{answer['probability']:.1%}".replace("%", " %")
        return {"class": (name, False), "probability": (share, True)}
    return {
        name: (f"{value:.6g}" if isinstance(value, float) else shown(value), isinstance(value, int | float))
        for name, value in answer.items()
    }
