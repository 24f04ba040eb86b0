"""Output of `vitpar train`: a header, progress, evaluations and the result.

On a terminal, progress is one live line, which a thread redraws while a step or an evaluation computes; otherwise it is
an occasional plain line without control characters.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from vitpar.text import count
from vitpar.training.events import Reporter, RunHeader
from vitpar.training.optim.state_memory import state_words
from vitpar_cli.outputs import CADENCE, facts_table, print_words
from vitpar_cli.plan_view import batch_rows, draw_ranks, millions
from vitpar_cli.recipe_words import recipe_rows

BAR = 16
"""Columns of the bar. A terminal without room for it has none."""
PLAIN_WIDTH = 100
"""Width of the header in columns if there is no terminal."""
COLUMNS = 40
"""Characters of a sparkline at most."""
BLOCKS = "▁▂▃▄▅▆▇█"
"""Characters from the smallest to the largest value."""
ASCII = "_.-~=+*#"
"""Characters for a terminal that has no `BLOCKS`."""


class ConsoleReporter(Reporter):
    """Reporter that prints the events of a run to a console.

    console: None for stdout.
    clock: function that returns monotonic seconds.
    quiet: whether to print only messages, warnings and the result.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic, quiet: bool = False
    ) -> None:
        self._console = console or _console()
        self._clock, self._quiet = clock, quiet
        self._printed = float("-inf")
        self._loss = Sparkline(1)
        self._begun = clock()
        self._awaiting, self._spinner = "making the model", Spinner("dots")
        self._row: dict[str, Any] | None = None
        self._first: tuple[int, float] | None = None
        self._newest = (0, 0.0)
        self._evaluating = ""
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            self._live = Live(console=self._console, get_renderable=self._line)
            self._live.start()
            self._console.show_cursor()  # rich hides it, and a killed process could not restore it

    def started(self, header: RunHeader) -> None:
        """Print the header of the run."""
        self._header, self._begun = header, self._clock()
        self._awaiting = f"{'compiling and ' * header.compiled}computing the first step"
        self._loss = Sparkline(header.steps)
        if self._live:
            from vitpar.planner.measure.trial import duration_words

            duration = duration_words(header.recipe, header.config, header.plan, header.steps, header.device)
            rows = [*_rows(header, self._console.width - 16), ("time", duration)]
            self._console.print(Panel(facts_table(rows), title="vitpar train", box=box.ROUNDED, expand=False))
        elif not self._quiet:
            for name, value in _rows(header, PLAIN_WIDTH - 11):
                for number, line in enumerate(str(value).split("\n")):
                    self._print(f"{'' if number else name:<11}{line}")

    def reached(self, step: int) -> None:
        """Note the step, for the live line."""
        self._newest = (step, self._clock())
        self._first = self._first or self._newest

    def stepped(self, row: dict[str, Any]) -> None:
        """Show a step: always on a terminal, otherwise the first, the last, and one per CADENCE seconds."""
        self._row = row
        self._loss.add(row["step"], row["loss"])
        if self._live:
            self._live.refresh()
        elif not self._quiet and (self._due() or row["step"] == self._header.steps):
            self._print(f"step {_fitting(self._parts(row))}")

    def _line(self) -> RenderableType:
        """Return the live line as it is now: what the run waits for, or the newest step and the progress within it."""
        if self._row is None:
            words = f"{self._evaluating or self._awaiting}  {_duration(self._clock() - self._begun)}"
            self._spinner.update(text=Text(words, no_wrap=True))
            return self._spinner
        # The bar's place has the progress of an evaluation, so that the step stays in its place.
        lead = f"{self._evaluating:<{BAR}}" if self._evaluating else "━" * BAR
        words = _fitting([(0 if self._evaluating else 3, lead), *self._parts(self._row)], self._console.width)
        line = Table.grid(padding=(0, 2, 0, 0))
        if words.startswith("━"):
            bar = ProgressBar(self._header.steps, self._newest[0], width=BAR)
            line.add_row(bar, Text(words[BAR + 2 :], no_wrap=True))
        else:
            line.add_row(Text(words, no_wrap=True))
        return line

    def _parts(self, row: dict[str, Any]) -> list[tuple[int, str]]:
        """Return the parts of a line about the newest step with their ranks: those of the highest are left out first.

        row: the newest one, which may be of an earlier step.
        """
        now = self._clock()
        loss = "?" if row["loss"] is None else f"{row['loss']:.4f}"  # the step was skipped
        scale = f"scale {row['loss_scale']:,.10g}" if "loss_scale" in row else ""
        scale += " skipped" if row.get("skipped") else ""
        parts = [
            (0, f"{self._newest[0]:,}/{self._header.steps:,}"),
            (4, f"epoch {row['epoch']:,.2f}"),
            (0, f"loss {loss}"),
            (1, scale),
            (4, self._header.task.training_words(row, brief=True)),
            (5, f"lr {row['lr']:.3g}"),
            (2, self._rate(row["images_per_second"])),
            (7, f"step {_ms(row['step_ms'])}"),
            (6, f"data {_ms(row['data_ms'])}"),
            (1, f"elapsed {_duration(now - self._begun)}"),
            (0, f"ETA {self._eta(now)}"),
        ]
        return [part for part in parts if part[1]]

    def _due(self) -> bool:
        """Return whether a plain line is due, and if so note that it is printed."""
        now = self._clock()
        due = now - self._printed >= CADENCE
        self._printed = now if due else self._printed
        return due

    def evaluating(self, images: int, total: int) -> None:
        """Show the progress of an evaluation: always on a terminal, otherwise one line per CADENCE seconds."""
        self._evaluating = f"evaluating {images:,}/{total:,}"
        if self._live:
            self._live.refresh()
        elif not self._quiet and 0 < images < total and self._due():
            self._print(f"{self._evaluating} {self._header.task.SAMPLE}s")

    def evaluated(self, row: dict[str, Any]) -> None:
        """Print the result of an evaluation."""
        self._evaluating = ""
        if not self._quiet:
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
            if (evaluated := self._header.task.best.name in summary)
            else "not evaluated: the data set has no labelled val split"
        )
        self._print(f"result     {result}", style="bold green")
        self._print(f"weights    {summary['weights']}")
        if evaluated and not self._header.task.AVERAGES:
            self._print(f"evaluate   {shlex.join(['vitpar', 'eval', *arguments])}")
        self._print(f"report     {shlex.join(['vitpar', 'report', self._header.folder])}")
        if self._header.config.pretrained is not None:
            data = arguments[arguments.index("--data") :] if "--data" in arguments else []
            words = ["vitpar", "train", "--task", "classify", "--weights", self._header.folder, *data]
            self._print(f"fine-tune  {shlex.join(words)}")

    def _rate(self, rate: float) -> str:
        return f"{rate:,.{0 if rate >= 100 else 1}f} {self._header.task.SAMPLE}s/s"

    def close(self) -> None:
        """Stop the live line; what the first step waited for is removed."""
        if self._live:
            self._live.transient = self._row is None
            self._live.stop()
            self._live = None

    def _print(self, text: str, style: str = "") -> None:
        """Print a line above the live line, without wrapping it, so that it can be copied and searched."""
        self._console.print(Text(text, style), soft_wrap=True, highlight=False)

    def _eta(self, now: float) -> str:
        """Return the remaining time at the average speed since the first step, evaluations included."""
        (first, then), (step, at) = self._first or self._newest, self._newest
        if step == first:
            return "?"
        return _duration(max(0.0, (at - then) / (step - first) * (self._header.steps - step) - (now - at)))


class Sparkline:
    """Means of a number over equal parts of a run.

    steps: steps of the complete run.
    """

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps)
        self._sums = [0.0] * COLUMNS
        self._counts = [0] * COLUMNS
        self._first: float | None = None
        self._last: float | None = None

    def add(self, step: int, value: float | None) -> None:
        """Record the value at `step`, from 1. A missing or infinite one is left out."""
        if value is None or not isfinite(value):
            return
        column = min(COLUMNS - 1, (step - 1) * COLUMNS // self._steps)
        self._sums[column] += value
        self._counts[column] += 1
        self._first = value if self._first is None else self._first
        self._last = value

    def words(self, encoding: str = "utf-8", form: str = ".4f") -> str | None:
        """Return the line with the first and the last value; None with less than two columns of values.

        encoding: of the output; one without `BLOCKS` gets `ASCII`.
        form: format of the two values.
        """
        means = [total / count for total, count in zip(self._sums, self._counts, strict=True) if count]
        if len(means) < 2:
            return None
        levels = BLOCKS if encoding.lower().startswith("utf") else ASCII
        least, span = min(means), max(means) - min(means)
        places = [round((mean - least) / span * (len(levels) - 1)) if span else 0 for mean in means]
        return f"{''.join(levels[place] for place in places)}  {self._first:{form}} to {self._last:{form}}"


def _console() -> Console:
    """Return a console on stdout. It is a terminal only if it can move the cursor, regardless of FORCE_COLOR."""
    console = Console()
    live = console.file.isatty() and not console.is_dumb_terminal
    return console if live else Console(force_terminal=False, no_color=True)


def _rows(header: RunHeader, width: int) -> Iterator[tuple[str, str | Text]]:
    """Yield names and values of the header.

    width: maximum columns of the rank grid.
    """
    recipe, plan = header.recipe, header.plan
    epochs = header.steps * recipe.train.batch_size / header.train_samples
    yield (
        "model",
        f"{header.config.name}, {millions(header.parameters)} parameters, "
        f"{count(header.config.num_classes, header.task.OUTPUT)}",
    )
    yield "mesh", f"{plan} on {count(plan.world_size, 'rank')} of {header.device.partition(':')[0]}"
    if plan.world_size > 1:
        yield "", draw_ranks(plan, width)
    yield "memory", f"{decimal(header.state_bytes)} per rank for {state_words(recipe)}"
    samples = f"{header.train_samples:,} training and {header.val_samples:,} validation {header.task.SAMPLE}s"
    yield "data", f"{recipe.data_name}: {samples}"
    yield from batch_rows(plan, recipe.train.batch_size, header.task.SAMPLE)
    yield "steps", f"{header.steps:,} ({epochs:,.1f} epochs)"
    yield from recipe_rows(header)
    yield "run", header.folder


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
