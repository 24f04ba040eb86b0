"""`vitpar runs`: list the runs in a folder."""

import json
import re
from pathlib import Path

import typer
from rich.console import Console

from vitpar.runs.folder import RunRecord, runs_in, summary
from vitpar.text import count, printable, rough_duration, shown
from vitpar_cli.outputs import print_words
from vitpar_cli.recipe_options import AsJson
from vitpar_cli.search_view import print_plans


def runs(
    folder: Path = typer.Argument(Path("runs"), metavar="[DIR]", help="Folder that holds runs, or one run."),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder, the newest first: state, steps, validation loss and metric, speed, age, model, data.

    A run is running, complete, stopped (it was asked to stop and has saved a checkpoint) or failed. Speed is the mean
    over its newest steps, age the time since it last wrote to its log.

    Example: vitpar runs
    """
    found = runs_in(folder)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "runs": list(map(summary, found))}))
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
    for line in _notes(found):
        print_words(console, line, "dim")


def _notes(found: list[RunRecord]) -> list[str]:
    """Return the notes of runs, the newest first; once for several runs whose notes differ in numbers at most."""
    alike: dict[str, list[RunRecord]] = {}
    for run in found:
        if run.note:
            alike.setdefault(re.sub(r"\d[\d.,]*", "0", run.note), []).append(run)
    lines = []
    for equal in alike.values():
        newest = equal[0]
        others = f" and {count(len(equal) - 1, 'more run')}" if len(equal) > 1 else ""
        lines.append(f"{printable(shown(newest.name))}{others}: {printable(shown(newest.note))}")
    return lines


def _cells(run: RunRecord, width: int, titled: bool) -> list[str]:
    """Return the cells of a run, the last in lines of `width`. titled: whether the metric's column has its name."""
    metric = "–"
    if run.metric and (number := run.last(run.metric.name)) is not None:
        value = run.metric.shown(number, brief=True)
        metric = printable(value if titled else f"{run.metric.words} {value}")
    steps, total = run.metrics.steps, run.total_steps
    model, data = (Path(shown(run.recipe.get(key, "?"))).name for key in ("model.name", "data.path"))
    name, words = printable(run.name), printable(f"{model} under {shown(run.plan_words)} on {data}")
    return [
        run.state,
        f"{steps:,}" if total in (None, steps) else f"{steps:,}/{_short(total)}",
        "–" if (loss := run.loss) is None else f"{loss:.4f}" if abs(loss) < 1e4 else f"{loss:.1e}",
        metric,
        "–" if (rate := run.images_per_second) is None else f"{rate:,.0f}",
        rough_duration(run.age_seconds),
        f"{name}:\n      {words}" if len(name) + len(words) + 8 > width else f"{name}: {words}",
    ]


def _short(number: int) -> str:
    return f"{number:,}" if number < 100_000 else f"{number / 1000:,.0f}k"
