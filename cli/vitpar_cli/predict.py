"""`vitpar predict` and `vitpar features`: predictions for images, and what the classifier reads for them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from vitpar.data.image_files import ImageFiles, NotedImages, expand_images
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError
from vitpar.recipe.request import NO_DATA, RecipeRequest
from vitpar.text import printable, shown
from vitpar.training.saved_model import AT_ONCE, saved_model
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import data_table, local_weights, print_json, progress_bar, refuse_unwritable, report_bad

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
        print_json({"checkpoint": str(saved.folder), "images": rows})
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


@o.shared(
    asked=o.recipe(
        *("assignments", "data", "precision", "own_model", "own_task"),
        data="Packed data, instead of image files.",
    )
)
def features(
    asked: RecipeRequest,
    checkpoint: o.CheckpointDir,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Parquet file to write.")],
    images: list[Path] | None = typer.Argument(
        None, metavar="[IMAGE...]", help="Image files; a folder stands for all images in it and its subfolders."
    ),
    split: str = typer.Option("val", "--data-split", help="Split of --data: val or train."),
    batch_size: AtOnce = None,
    device: o.DeviceName = None,
    as_json: o.AsJson = False,
) -> None:
    """Write the features of images to a Parquet file, on one device.

    The features of an image are what the classifier reads: the pooled tokens after the last norm and, if the model has
    one, the representation layer. The columns are key, label (null for image files) and embedding (float32). Images are
    prepared as `vitpar eval` does. An image that cannot be read is reported and left out, and the exit code is 1.

    Example: vitpar features --data data_shards/mine --data-split train --checkpoint runs/mine --out train.parquet
    """
    data = asked.given.get("data.path")
    asked |= NO_DATA if images else {}
    if bool(images) == (data is not None):
        raise DataError("vitpar features reads either image files or a data set: name images, or --data DIR")
    refuse_unwritable(out)
    files = ImageFiles(expand_images(images)) if images else None
    saved = saved_model(checkpoint, asked, doing="an extraction of features", fetch=local_weights).encoder()
    from vitpar.training.inference import classifiers, feature_width, outputs
    from vitpar.training.parquet_file import feature_file

    given_images = files or ShardSet.open(str(saved.recipe.data.path), split)
    source = NotedImages(given_images)
    labelled = isinstance(given_images, ShardSet)
    names = next(iter(given_images.names_of_classes), None) if isinstance(given_images, ShardSet) else None
    width, layers = feature_width(saved.config), [f"head.{name}" for name in classifiers(saved.config)]
    about = {"model": saved.config.name, "weights": str(saved.folder), "input_of": layers, "classes": names}
    written = 0
    at_once = min(len(source), batch_size or AT_ONCE)
    with (
        feature_file(out, width, about) as file,
        saved.on_device(at_once, device) as (built, inputs),
        progress_bar("features") as progress,
    ):
        for batch in outputs(built, inputs, source, features=True, progress=progress):
            numbers = [int(source.labels[sample]) if labelled else None for sample in batch.samples]
            file.add([source.name(sample) for sample in batch.samples], numbers, batch.features)
            written += len(numbers)
    if as_json:
        print_json({"file": str(out), "images": written, "features": width, "input_of": layers})
    else:
        typer.echo(f"{out}: {written:,} images, {width:,} features each (input of {' and '.join(layers)})")
    raise typer.Exit(report_bad(source.problems))
