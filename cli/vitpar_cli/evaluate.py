"""`vitpar eval`: evaluate saved weights."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.stream.stream_set import ImageSet, StreamSet
from vitpar.errors import DataError
from vitpar.recipe.request import RecipeRequest
from vitpar.tasks import Task
from vitpar.tasks.data import open_split
from vitpar.text import printable
from vitpar.training.saved_model import PlannedModel, saved_model
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import data_table, local_weights, print_json, progress_bar, refuse_unwritable, warn
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
