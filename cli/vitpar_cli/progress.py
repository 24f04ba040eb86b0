"""Output of `vitpar train`: a header, progress, evaluations and the result.

On a terminal, progress is one live line; otherwise it is an occasional plain line without control characters.
"""

from __future__ import annotations

import atexit
import shlex
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from vitpar.strategy import batch_arithmetic
from vitpar.text import count
from vitpar.training.events import Reporter, RunHeader
from vitpar_cli.outputs import print_words
from vitpar_cli.plan_words import batch_words, millions, pipeline_words
from vitpar_cli.rank_grid import draw_ranks
from vitpar_cli.recipe_words import recipe_rows
from vitpar_cli.sparkline import Sparkline

CADENCE = 10.0
"""Minimum seconds between two plain lines of progress."""
BAR = 40
"""Maximum width of the bar in columns."""
PLAIN_WIDTH = 100
"""Width of the header in columns if there is no terminal."""


class ConsoleReporter(Reporter):
    """Reporter that prints the events of a run to a console.

    console: None for stdout.
    clock: function that returns monotonic seconds.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or _console()
        self._clock = clock
        self._live: _LiveLine | None = None
        self._printed = float("-inf")
        self._loss = Sparkline(1)

    def started(self, header: RunHeader) -> None:
        """Print the header of the run."""
        self._header, self._begun = header, self._clock()
        self._first: tuple[int, float] | None = None
        self._loss = Sparkline(header.steps)
        if self._console.is_terminal:
            rows = _rows(header, self._console.width - 16)
            self._console.print(Panel(_table(rows), title="vitpar train", box=box.ROUNDED, expand=False))
            self._live = _LiveLine(self._console, header.steps)
            atexit.register(self._live.stop)
        else:
            for name, value in _rows(header, PLAIN_WIDTH - 11):
                for number, line in enumerate(str(value).split("\n")):
                    self._print(f"{'' if number else name:<11}{line}")

    def stepped(self, row: dict[str, Any]) -> None:
        """Show a step: always on a terminal, otherwise the first, the last, and one per CADENCE seconds."""
        step, now = row["step"], self._clock()
        self._first = self._first or (step, now)
        self._loss.add(step, row["loss"])
        parts = self._parts(row, now)
        if self._live:
            self._live.show(step, _fitting(parts, self._console.width))
        elif self._due(now) or step == self._header.steps:
            self._print(f"step {_fitting(parts)}")

    def _parts(self, row: dict[str, Any], now: float) -> list[tuple[int, str]]:
        """Return the parts of a line about a step, each with its rank: those of the highest are left out first."""
        loss = "?" if row["loss"] is None else f"{row['loss']:.4f}"  # the step was skipped
        scale = f"scale {row['loss_scale']:,.10g}" if "loss_scale" in row else ""
        scale += " skipped" if row.get("skipped") else ""
        parts = [
            (0, f"{row['step']:,}/{self._header.steps:,}"),
            (3, f"epoch {row['epoch']:,.2f}"),
            (0, f"loss {loss}"),
            (1, scale),
            (3, self._header.task.training_words(row, brief=True)),
            (4, f"lr {row['lr']:.3g}"),
            (2, self._rate(row["images_per_second"])),
            (7, f"step {_ms(row['step_ms'])}"),
            (6, f"data {_ms(row['data_ms'])}"),
            (5, f"elapsed {_duration(now - self._begun)}"),
            (0, f"ETA {self._eta(row['step'], now)}"),
        ]
        return [part for part in parts if part[1]]

    def _due(self, now: float) -> bool:
        """Return whether a plain line is due, and if so note that it is printed."""
        due = now - self._printed >= CADENCE
        self._printed = now if due else self._printed
        return due

    def evaluating(self, images: int, total: int) -> None:
        """Show the progress of an evaluation: always on a terminal, otherwise one line per CADENCE seconds."""
        line = f"evaluating {images:,}/{total:,} {self._header.task.SAMPLE}s"
        if self._live:
            self._live.show(None, line)
        elif 0 < images < total and self._due(self._clock()):
            self._print(line)

    def evaluated(self, row: dict[str, Any]) -> None:
        """Print the result of an evaluation."""
        self._print(f"step {row['step']:,}  val {self._header.task.words(row, brief=True)}", style="bold")

    def note(self, text: str) -> None:
        """Print a warning."""
        print_words(self._console, f"warning: {text}", "yellow")

    def info(self, text: str) -> None:
        """Print a message."""
        print_words(self._console, text, "bold")

    def finished(self, summary: dict[str, Any]) -> None:
        """Print the course of the loss, the result, the path of the weights and the command that evaluates them."""
        self.close()
        rate = summary["images_per_second"]
        average = f", {self._rate(rate)} on average" if rate else ""
        recipe = self._header.recipe
        arguments = ["--checkpoint", summary["weights"]]
        for option, name in (("--model", recipe.model.name), ("--task", recipe.task.name)):
            arguments += [option, name] if ".py:" in name else []
        arguments += [] if recipe.data.path is None else ["--data", recipe.data.path]
        arguments += ["--set", "stream.allow_pipe=true"] if recipe.stream.allow_pipe else []
        self._print(f"done       {_duration(self._clock() - self._begun)}{average}", style="bold green")
        if loss := self._loss.words(self._console.encoding):
            self._print(f"loss       {loss}")
        result = (
            f"val {self._header.task.words(summary, brief=True)}"
            if "loss" in summary
            else "not evaluated: the data set has no val split"
        )
        self._print(f"result     {result}", style="bold green")
        self._print(f"weights    {summary['weights']}")
        if "loss" in summary:
            self._print(f"evaluate   {shlex.join(['vitpar', 'eval', *arguments])}")
        self._print(f"report     {shlex.join(['vitpar', 'report', self._header.folder])}")

    def _rate(self, rate: float) -> str:
        return f"{rate:,.{0 if rate >= 100 else 1}f} {self._header.task.SAMPLE}s/s"

    def close(self) -> None:
        """Stop the live line."""
        if self._live:
            self._live.stop()
            atexit.unregister(self._live.stop)
            self._live = None

    def _print(self, text: str, style: str = "") -> None:
        """Print a line above the live line, without wrapping it, so that it can be copied and searched."""
        self._console.print(Text(text, style), soft_wrap=True, highlight=False)

    def _eta(self, step: int, now: float) -> str:
        """Return the remaining time at the average speed since the first step shown, evaluations included."""
        assert self._first is not None
        first, then = self._first
        return _duration((now - then) / (step - first) * (self._header.steps - step)) if step > first else "?"


class _LiveLine:
    """Bar and text on the last line of a terminal."""

    def __init__(self, console: Console, steps: int) -> None:
        self._bar = BarColumn(bar_width=0)
        # No background refresh: the log interval decides when there is something new to show.
        self._progress = Progress(self._bar, TextColumn("{task.description}"), console=console, auto_refresh=False)
        self._task = self._progress.add_task("", total=steps)
        self._progress.start()
        console.show_cursor()  # rich hides it, and a killed process could not restore it
        self.show(0, f"0/{steps:,}  waiting for the first step")

    def show(self, step: int | None, line: str) -> None:
        """Redraw the line; the bar takes the width that the text leaves free.

        step: that the bar shows; None to leave it as it is.
        """
        self._bar.bar_width = max(0, min(BAR, self._progress.console.width - len(line) - 1))
        self._progress.update(self._task, completed=step, description=line, refresh=True)

    def stop(self) -> None:
        """Leave the line as it is and release the terminal. Further calls do nothing."""
        self._progress.stop()


def _console() -> Console:
    """Return a console on stdout. It is a terminal only if it can move the cursor, regardless of FORCE_COLOR."""
    console = Console()
    live = console.file.isatty() and not console.is_dumb_terminal
    return console if live else Console(force_terminal=False, no_color=True)


def _rows(header: RunHeader, width: int) -> Iterator[tuple[str, str | Text]]:
    """Yield names and values of the header.

    width: maximum columns of the rank grid.
    """
    from vitpar.planner.cost.pipeline import idle_share
    from vitpar.training.optim.state_memory import state_words

    recipe, plan = header.recipe, header.plan
    batch = batch_arithmetic(plan, recipe.train.batch_size)
    epochs = header.steps * recipe.train.batch_size / header.train_samples
    yield (
        "model",
        f"{header.config.name}, {millions(header.parameters)} parameters, "
        f"{count(header.config.num_classes, header.task.OUTPUT)}",
    )
    yield "mesh", f"{plan} on {count(plan.world_size, 'rank')} of {header.device.partition(':')[0]}"
    if plan.world_size > 1:
        yield "", draw_ranks(plan, width)
    if plan.pipeline_degree > 1:
        yield "pipeline", pipeline_words(plan, idle_share(plan, batch.microbatches))
    yield "memory", f"{decimal(header.state_bytes)} per rank for {state_words(recipe)}"
    samples = f"{header.train_samples:,} training and {header.val_samples:,} validation {header.task.SAMPLE}s"
    yield "data", f"{recipe.data_name}: {samples}"
    yield "batch", batch_words(batch, header.task.SAMPLE)
    yield "steps", f"{header.steps:,} ({epochs:,.1f} epochs)"
    yield from recipe_rows(header)
    yield "run", header.folder


def _table(rows: Iterator[tuple[str, str | Text]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value if isinstance(value, Text) else Text(value))
    return table


def _fitting(parts: list[tuple[int, str]], width: int | None = None) -> str:
    """Join the parts of a line, without those of the highest ranks if it would be longer than the terminal.

    parts: rank and text of each; rank 0 always stays.
    width: columns of the terminal; None for no limit.
    """
    kept = list(parts)
    while width is not None and len("  ".join(text for _, text in kept)) >= width:
        least = max(rank for rank, _ in kept)
        if least == 0:
            break
        kept = [part for part in kept if part[0] != least]
    return "  ".join(text for _, text in kept)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.{0 if milliseconds >= 100 else 1}f} ms"


def _duration(seconds: float) -> str:
    """Return a duration such as `0:07`, `12:34` or `5:00:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
