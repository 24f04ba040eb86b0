"""`vitpar features`: write what the classifier reads, for images or a data set, to a Parquet file."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vitpar.data.image_files import ImageFiles, NotedImages, expand_images
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError
from vitpar.recipe.request import NO_DATA, RecipeRequest
from vitpar.training.saved_model import AT_ONCE, saved_model
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import local_weights, progress_bar, refuse_unwritable, report_bad
from vitpar_cli.predict import AtOnce


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
        typer.echo(json.dumps({"file": str(out), "images": written, "features": width, "input_of": layers}))
    else:
        typer.echo(f"{out}: {written:,} images, {width:,} features each (input of {' and '.join(layers)})")
    raise typer.Exit(report_bad(source.problems))
