"""`vitpar runs`, `vitpar board` and `vitpar report`: list runs, serve their table, and write or serve their pages."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vitpar.data.image_files import NotedImages
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError
from vitpar.recipe.request import RecipeRequest
from vitpar.runs.folder import RunRecord, refuse_other_folders, runs_in, summary
from vitpar.runs.page import MOST_RUNS
from vitpar.runs.page import report as page_of
from vitpar.runs.pages.plotly import library
from vitpar.runs.predictions import MOST_IMAGES, drawn_samples, pictures_sheet, predict, sheet
from vitpar.tasks.data import open_split
from vitpar.text import count, printable, rough_duration, shown
from vitpar.training.saved_model import AT_ONCE, saved_model
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import (
    local_weights,
    origin,
    origin_words,
    print_json,
    print_words,
    progress_bar,
    refuse_unwritable,
    report_bad,
    warn,
    write,
)
from vitpar_cli.search_view import print_plans


def runs(
    folder: Path = typer.Argument(Path("runs"), metavar="[DIR]", help="Folder that holds runs, or one run."),
    as_json: o.AsJson = False,
) -> None:
    """List the runs in a folder, the newest first: state, steps, validation loss and metric, speed, age, model, data.

    A run is running, complete, stopped (it was asked to stop and has saved a checkpoint) or failed. Speed is the mean
    over its newest steps, age the time since it last wrote to its log.

    Example: vitpar runs
    """
    found = runs_in(folder)
    if as_json:
        print_json({"folder": str(folder), "runs": list(map(summary, found))})
        return
    if not found:
        typer.echo(f"no runs in {folder}")
        return
    console = Console(highlight=False)
    titles = {run.metric.words for run in found if run.metric and run.last(run.metric.name) is not None}
    title = titles.pop() if len(titles) == 1 else "metric"
    headings = ("state", "steps", "loss", printable(title), "samples/s", "age")
    rows = [_cells(run, console.width, titled=title != "metric") for run in found]
    print_plans(console, f"runs in {printable(str(folder))}", headings, rows, "run")
    alike: dict[str, list[RunRecord]] = {}  # runs whose notes differ in numbers at most, the newest first
    for run in found:
        if run.note:
            alike.setdefault(re.sub(r"\d[\d.,]*", "0", run.note), []).append(run)
    for newest, *others in alike.values():
        more = f" and {count(len(others), 'more run')}" if others else ""
        print_words(console, f"{printable(shown(newest.name))}{more}: {printable(shown(newest.note))}", "dim")


def _cells(run: RunRecord, width: int, titled: bool) -> list[str]:
    """Return the cells of a run, the last in lines of `width`. titled: whether the metric's column has its name."""
    metric = "–"
    if run.metric and (number := run.last(run.metric.name)) is not None:
        value = run.metric.shown(number, brief=True)
        metric = printable(value if titled else f"{run.metric.words} {value}")
    steps = run.metrics.steps
    total = run.total_steps or steps
    whole = f"{total:,}" if total < 100_000 else f"{total / 1000:,.0f}k"
    model, data = (Path(shown(run.recipe.get(key, "?"))).name for key in ("model.name", "data.path"))
    name, words = printable(run.name), printable(f"{model} under {shown(run.plan_words)} on {data}")
    return [
        run.state,
        f"{steps:,}" if total == steps else f"{steps:,}/{whole}",
        "–" if (loss := run.loss) is None else f"{loss:.4f}" if abs(loss) < 1e4 else f"{loss:.1e}",
        metric,
        "–" if (rate := run.images_per_second) is None else f"{rate:,.0f}",
        rough_duration(run.age_seconds),
        f"{name}:\n      {words}" if len(name) + len(words) + 8 > width else f"{name}: {words}",
    ]


PORT = 8123
"""Port by default, of live reports too."""


def board(
    folder: Path = typer.Argument(Path("runs"), metavar="[DIR]", help="Folder that holds runs."),
    port: int = typer.Option(PORT, "--port", min=0, max=65535, help="Port; 0 for any free one."),
) -> None:
    """Serve a page on 127.0.0.1 with all runs of a folder, which follows them while they train.

    Its table has state, data, model, plan, steps, loss, metric and speed of each run, and can be sorted. A run's name
    opens its page, marked runs are compared: charts, plans, differences of settings. Runs that differ in their seed
    alone are summed up.

    Example: vitpar board
    """
    serve_pages(folder, port)


def serve_pages(runs: Path | list[Path], port: int) -> None:
    """Serve the board of a folder, or the report of runs, until Ctrl-C."""
    from vitpar.runs.live import LiveReport

    library()  # refuses to work without it
    with LiveReport(runs, port, origin_words(origin())) as server:
        typer.echo(f"serving    {server.url}  (Ctrl-C ends it)")
        server.run()


@o.shared(
    asked=o.recipe("data", "own_model", "own_task", data="Data of --images.  \\[default: what it was trained on]")
)
def report(
    asked: RecipeRequest,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/mine.")],
    out: Path | None = typer.Option(None, "--out", metavar="FILE", help="Page to write.  \\[default: report.html]"),
    images: int | None = typer.Option(
        None,
        "--images",
        min=1,
        metavar="N",
        help="Show N validation images with their predictions, the confusion matrix, a table of classes and the "
        "most confident mistakes; for a masked autoencoder N images as they are, masked and reconstructed. They "
        "are computed with the run's weights, on one device.",
    ),
    live: bool = typer.Option(
        False, "--live", help="Serve the page on 127.0.0.1 instead, and update it while the runs continue."
    ),
    port: int | None = typer.Option(
        None, "--port", min=0, max=65535, help=f"Port of --live; 0 for any free one.  \\[default: {PORT}]"
    ),
    device: o.DeviceName = None,
) -> None:
    """Write a self-contained HTML page about one or several runs: results, charts, plans, settings, versions.

    The charts show every metric over steps, samples or hours, with values under the pointer, zoom, checkpoints and
    restarts. Several runs are overlaid. The page loads nothing from the network.

    Example: vitpar report runs/mine

    Example: vitpar report runs/dp2 runs/tp2 --out compared.html

    Example: vitpar report runs/mine --images 48

    Example: vitpar report runs/mine --live
    """
    for path in runs:
        refuse_other_folders(path)
    if len(runs) > MOST_RUNS:
        raise DataError(f"a report shows at most {MOST_RUNS} runs but {len(runs)} are named: name fewer")
    of_images = {"--data": asked.given.get("data.path"), "--device": device}
    idle = next((name for name, value in of_images.items() if value is not None), None)
    for wrong, sentence in (
        (live and out, "--out does nothing with --live, which serves the page instead of writing it: leave one out"),
        (live and images, "--images does nothing with --live, which computes no predictions: leave one out"),
        (port is not None and not live, "--port does nothing without --live: add --live, or leave it out"),
        (idle and images is None, f"{idle} does nothing without --images: add --images N, or leave it out"),
        (
            (images or 0) > MOST_IMAGES,
            f"--images is {images}: use at most {MOST_IMAGES}, since the page contains them",
        ),
        (images and len(runs) > 1, f"--images shows the predictions of one run but {len(runs)} are named: name one"),
    ):
        if wrong:
            raise DataError(sentence)
    if live:
        serve_pages(runs, PORT if port is None else port)
        return
    library()  # refuses to work without it
    out = out or Path("report.html")
    refuse_unwritable(out)
    extra, problems = ("", {}) if images is None else _predictions(runs[0], images, asked, device)
    page = page_of([RunRecord(path) for path in runs], made_by=origin_words(origin()), extra=extra)
    write(out, page)
    typer.echo(f"written    {out}  ({len(page.encode()) / 1e6:,.2f} MB)")
    raise typer.Exit(report_bad(problems))


def _predictions(run: Path, number: int, asked: RecipeRequest, device: str | None) -> tuple[str, Mapping[int, str]]:
    """Return HTML with validation images of a run and what its model, on one device, makes of them, and bad images."""
    saved = saved_model(run, asked, doing="an evaluation", fetch=local_weights)
    task = saved.task()
    if not task.PICTURES and not task.OUTPUTS_ARE_LABELS:
        written = ", or write the predictions with `vitpar eval --predictions`" if task.PREDICTS else ""
        raise DataError(
            f"--images shows classes, which task '{saved.recipe.task.name}' does not predict: leave it out{written}"
        )
    validation = open_split(saved.recipe, "val")
    if not isinstance(validation, ShardSet):
        raise DataError("--images reads single validation images, which a stream cannot: name packed data with --data")
    validation, note = saved.labelled(validation)
    assert isinstance(validation, ShardSet)
    source = NotedImages(validation, drawn_samples(len(validation), number) if task.PICTURES else None)
    about = f"By the weights in {saved.folder}, for the validation images of {validation.place}."
    with saved.on_device(min(len(source), AT_ONCE), device) as (model, inputs), progress_bar("predicting") as progress:
        from vitpar.training.inference import pictures

        if task.PICTURES:
            shown = (
                (loss, {name: picture.permute(1, 2, 0).numpy() for name, picture in pixels.items()})
                for loss, pixels in pictures(model, inputs, source, progress)
            )
            extra = pictures_sheet(shown, f"{task.PICTURES} {about}")
        else:
            names = saved.class_names() or validation.class_names or tuple(map(str, range(validation.num_classes)))
            extra = sheet(predict(model, inputs, source, names, progress), validation.read, number, about)
    warn(note)
    return extra, source.problems
