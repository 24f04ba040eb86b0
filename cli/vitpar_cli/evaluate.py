"""`vitpar eval`, `vitpar predict` and `vitpar features`: what saved weights give for data sets and images."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from vitpar.data.image_files import ImageFiles, NotedImages, expand_images
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.stream.stream_set import ImageSet, StreamSet
from vitpar.errors import DataError
from vitpar.recipe.request import NO_DATA, RecipeRequest
from vitpar.tasks import Task
from vitpar.tasks.data import open_split
from vitpar.text import printable, shown
from vitpar.training.saved_model import AT_ONCE, PlannedModel, saved_model
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import data_table, local_weights, print_json, progress_bar, refuse_unwritable, report_bad, warn
from vitpar_cli.world import run_in_world

if TYPE_CHECKING:
    import torch

    from vitpar.training.evaluate import Evaluation, Predictions
    from vitpar.training.parquet_file import ParquetFile


@o.shared(asked=o.recipe("assignments", "batch_size", "precision", "own_model", "own_task"))
def evaluate(
    asked: RecipeRequest,
    checkpoint: o.CheckpointDir,
    data: list[Path] | None = typer.Option(
        None,
        "--data",
        metavar="DIR",
        help="Packed data; repeat it for several data sets.  \\[default: what it was trained on]",
        rich_help_panel="Model and data",
    ),
    split: str = typer.Option("val", "--data-split", help="Split to evaluate: val, train or test."),
    predictions: Path | None = typer.Option(
        None,
        "--predictions",
        metavar="FILE.parquet",
        help="Write a row for each image: its label, and what the model predicts.",
    ),
    mesh: str = typer.Option("dp1", "--mesh", metavar="STRATEGY", help="Mesh to evaluate under."),
    device: o.DeviceName = None,
    as_json: o.AsJson = False,
) -> None:
    """Evaluate saved weights on a complete split of data sets, under any mesh, independent of the training mesh.

    If the path is a run, evaluates its final weights or, if the run has not ended, its newest checkpoint. Results are
    the images, the loss and the metrics of the task: for classification top-1 and top-5 accuracy and the expected
    calibration error (15 bins). Classes are matched by name, so data may number them in another order or have only some
    of them.

    Example: vitpar eval --checkpoint runs/20260102-… --data data_shards/digits

    Example: vitpar eval --checkpoint runs/mine --data data_shards/one --data data_shards/two --predictions all.parquet
    """
    named = data or []
    for path in named:
        RecipeRequest(given={"data.path": str(path)}).refuse_early()
    asked |= {"data.path": str(named[0])} if named else {}
    if len({path.resolve() for path in named}) < len(named):
        raise DataError("--data names a data set twice: keep one")
    refuse_unwritable(predictions)
    if predictions is not None and predictions.suffix != ".parquet":
        raise DataError(f"--predictions writes Parquet: name '{predictions.with_suffix('.parquet')}'")
    saved = saved_model(checkpoint, asked, doing="an evaluation", mesh=mesh, fetch=local_weights)
    if saved.task().AVERAGES:
        raise DataError(
            f"models of task '{saved.recipe.task.name}' have no labels to be evaluated with: write features with "
            "`vitpar features`, and evaluate these with `vitpar probe`"
        )
    sets: dict[str, ImageSet] = {saved.recipe.data_name: open_split(saved.recipe, split)}
    sets |= {str(path): ShardSet.open(path, split) for path in named[1:]}
    notes: list[str | None] = []
    for name, images in sets.items():
        sets[name], note = saved.labelled(images)
        notes.append(note)
        if predictions is not None and not saved.task().PREDICTS:
            raise DataError(f"--predictions has nothing to write for task '{saved.recipe.task.name}': leave it out")
        if predictions is not None and not isinstance(images, ShardSet):
            raise DataError("--predictions needs packed data, since a stream has no order: index its shards")
    if predictions is not None:
        from vitpar.training.parquet_file import arrow

        arrow()  # refuses a missing pyarrow before ranks start
    planned = saved.planned(device)
    ranks, where = planned.chosen.plan.world_size, planned.device_type
    run_in_world(ranks, where, _evaluate, planned, sets, notes, split, predictions, as_json)


def _evaluate(
    device: "torch.device",
    planned: PlannedModel,
    sets: Mapping[str, ImageSet],
    notes: Sequence[str | None],
    split: str,
    predictions: Path | None,
    as_json: bool,
) -> int:
    """Evaluate data sets on the rank of `device`, and return the exit code."""
    import torch.distributed as dist

    from vitpar.tasks.inputs import build_input
    from vitpar.training.evaluate import evaluate
    from vitpar.training.parquet_file import prediction_file

    model, warning = planned.built(device, sets)
    task, reports = planned.task(), dist.get_rank() == 0
    results: dict[str, Evaluation] = {}
    with ExitStack() as stack:
        file = None
        if predictions is not None and reports:
            about = {"model": planned.config.name, "weights": str(planned.folder), "split": split}
            like = task.predict(task.trial()[0])
            file = stack.enter_context(prediction_file(predictions, like, about))
        show = stack.enter_context(progress_bar("evaluating")) if reports else lambda done, total: None
        for name, images in sets.items():
            add = None if predictions is None else partial(_add, file, name, images)
            source = build_input(planned.recipe, model, planned.task(images))
            results[name] = evaluate(model, source, images, partial(show, total=len(images)), add)
    if reports:
        warnings = {name: one.warning for name, one in results.items() if one.warning}
        warn(warning, *notes, *(f"'{name}': {text}" if len(sets) > 1 else text for name, text in warnings.items()))
        _print(results, task, split, as_json)
    return 0


def _add(file: "ParquetFile | None", data: str, images: ImageSet, predictions: "Predictions") -> None:
    """Append predictions for images of the data set `data` to a file, on the rank that has it, which alone gets any."""
    assert file is not None and not isinstance(images, StreamSet)
    keys = [images.name(sample) for sample in predictions.samples.tolist()]
    file.add([data] * len(keys), predictions.samples, keys, predictions.labels, *predictions.values.values())


def _print(results: "Mapping[str, Evaluation]", task: Task, split: str, as_json: bool) -> None:
    """Print the result for each data set: one line or JSON object for one of them, a table or a list for several."""
    metrics, sample = task.METRICS, task.SAMPLE
    if as_json:
        figures = [{"data": printable(name), **one.figures} for name, one in results.items()]
        print_json({"data_sets": figures} if len(figures) > 1 else next(iter(results.values())).figures)
    elif len(results) == 1:
        (one,) = results.values()
        words = [f"{metric.words} {metric.shown(one.metrics[metric.name])}" for metric in metrics]
        words += [f"loss {one.metrics['loss']:.4f}"]
        typer.echo(f"{one.samples} {sample}s of '{split}': {', '.join(words)}")
    else:
        numbers = (f"{sample}s", *(metric.words for metric in metrics), "loss")
        table = data_table("data", numbers=numbers, title=f"Split '{split}'")
        table.columns[0].overflow = "fold"
        for name, one in results.items():
            shown = [metric.shown(one.metrics[metric.name]) for metric in metrics]
            table.add_row(Text(printable(name)), f"{one.samples:,}", *shown, f"{one.metrics['loss']:.4f}")
        Console().print(table)


IMAGES = "Image files; a folder stands for all images in it and its subfolders."
AtOnce = Annotated[
    int | None, typer.Option("--batch-size", min=1, help=f"Images that are computed at a time.  \\[default: {AT_ONCE}]")
]


@o.shared(asked=o.recipe("assignments", "precision", "own_model", "own_task"))
def predict(
    asked: RecipeRequest,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help=IMAGES)],
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
    images: list[Path] | None = typer.Argument(None, metavar="[IMAGE...]", help=IMAGES),
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
