"""`vitpar runs`: list the runs in a folder."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from vitpar.text import count, printable, rough_duration, shown
from vitpar_cli.outputs import data_table, print_words
from vitpar_cli.recipe_options import AsJson

if TYPE_CHECKING:
    from vitpar.runs.folder import RunRecord

PLAN_WIDTH, METRIC_WIDTH, LEAST_NAME = 13, 12, 14
"""Maximum columns of a plan and of a metric, and minimum columns of a name; longer ones take several lines."""


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder that holds runs, or one run.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder, the newest first: state, plan, steps, validation loss and metric, speed, age.

    A run is running, complete, stopped (it was asked to stop and has saved a checkpoint) or failed. Speed is the mean
    over its newest steps, age the time since it last wrote to its log.

    Example: vitpar runs
    """
    from vitpar.runs.listing import runs_in, summary

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
    table = data_table("run", "state", "plan", "steps", "loss", printable(title), "samples/s", "age")
    table.padding = (0, 1, 0, 0)
    for column in table.columns:
        column.no_wrap = True
    name, plan = table.columns[0], table.columns[2]
    name.no_wrap, name.overflow, name.min_width = False, "fold", LEAST_NAME
    plan.no_wrap, plan.overflow, plan.max_width = False, "fold", PLAN_WIDTH
    for column in table.columns[3:]:
        column.justify = "right"
    metric = table.columns[5]
    metric.no_wrap, metric.max_width = False, METRIC_WIDTH
    for run in found:
        table.add_row(*map(Text, _cells(run, titled=title != "metric")))
    console.print(table)
    for line in _notes(found):
        print_words(console, line, "dim")


def _notes(found: "list[RunRecord]") -> list[str]:
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


def _cells(run: "RunRecord", titled: bool) -> list[str]:
    """Return the cells of a run. titled: whether the column of the metric has its name."""
    metric = "–"
    if run.metric and (number := run.last(run.metric.name)) is not None:
        value = run.metric.shown(number, brief=True)
        metric = printable(value if titled else f"{run.metric.words} {value}")
    steps, total = run.metrics.steps, run.total_steps
    return [
        printable(run.name),
        run.state,
        printable(shown(run.plan_words)),
        f"{steps:,}" if total in (None, steps) else f"{steps:,}/{_short(total)}",
        "–" if (loss := run.loss) is None else f"{loss:.4f}" if abs(loss) < 1e4 else f"{loss:.1e}",
        metric,
        "–" if (rate := run.images_per_second) is None else f"{rate:,.0f}",
        rough_duration(run.age_seconds),
    ]


def _short(number: int) -> str:
    return f"{number:,}" if number < 100_000 else f"{number / 1000:,.0f}k"
