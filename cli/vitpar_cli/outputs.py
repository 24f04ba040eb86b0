"""Output of commands: warnings, progress, files, and their provenance.

Files that cannot be written are refused before a command does any work.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitpar.errors import PlannerError
from vitpar.io import write_text
from vitpar.runs.pages.plotly import library
from vitpar.terminal import complain, is_terminal, wrap
from vitpar.text import printable
from vitpar.training import hub_weights

CADENCE = 10.0
"""Minimum seconds between two lines of progress if stderr is not a terminal."""
Row = tuple[str, str]
"""Name and sentence."""


def origin() -> dict[str, str]:
    """Return the version of vitpar and the command line as it was typed, for JSON."""
    from vitpar import __version__

    return {"vitpar": __version__, "command": shlex.join(["vitpar", *sys.argv[1:]])}


def origin_words(found: Mapping[str, Any]) -> str:
    """Return the version and command of a result, as in `vitpar 0.1.0: vitpar plan dp2`."""
    return f"vitpar {found['vitpar']}: {found['command']}"


def refuse_undrawable(report: Path | None) -> None:
    """Raise DataError if a page with charts is to be written, and Plotly is not installed."""
    if report is not None:
        library()


class Status:
    """Activity of a command on stderr: one live line on a terminal, otherwise a plain line every CADENCE seconds.

    shown: whether there is any.
    clock: function that returns monotonic seconds.
    """

    def __init__(self, shown: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._live = Console(stderr=True).status("") if shown and is_terminal(sys.stderr) else None
        self._clock, self._printed = clock, clock() if shown else math.inf

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def tell(self, words: str) -> None:
        """Show the current activity, in words."""
        if self._live:
            self._live.update(words)
        elif (now := self._clock()) - self._printed >= CADENCE:
            self._printed = now
            typer.echo(words, err=True)


@contextmanager
def progress_bar(label: str, shown: bool = True) -> Iterator[Callable[..., Any]]:
    """Show progress on stderr, and yield the callback (done, total, words = label) that moves it.

    It is a bar on a terminal, and lines elsewhere. shown: whether there is one.
    """
    if not (shown and is_terminal(sys.stderr)):
        status = Status(shown)
        yield lambda done, total, words=label: status.tell(f"{words} {done:,}/{total:,}")
        return
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total, words=label: bar.update(task, completed=done, total=total, description=words)


local_weights = partial(hub_weights.local_weights, showing=progress_bar)
"""``vitpar.training.hub_weights.local_weights`` that shows the progress of an import."""


def report_bad(problems: Mapping[int, str]) -> int:
    """Print a line to stderr for each image that could not be read, and return the exit code: 1 if there is one.

    problems: messages by the image's number.
    """
    for _, problem in sorted(problems.items()):
        complain(f"error: {printable(problem)}")
    return 1 if problems else 0


def warn(*sentences: str | None) -> None:
    """Print warnings to stderr; None and empty ones are left out."""
    for sentence in filter(None, sentences):
        complain(f"warning: {sentence}")


def print_words(console: Console, text: str, style: str = "", indent: int = 2) -> None:
    """Print a line, broken between words on a terminal; elsewhere it stays whole, so that it can be searched.

    indent: columns before each further line.
    """
    live = console.is_terminal and not console.is_dumb_terminal
    words = wrap(text, console.width, indent) if live else text
    console.print(Text(words, style), soft_wrap=True, highlight=False)


def print_rows(console: Console, rows: Iterable[Row]) -> None:
    """Print rows of a name and a sentence."""
    for name, words in rows:
        print_words(console, f"{name:<10} {words}", indent=11)


def print_json(record: object) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(record))


def data_table(*headings: str, numbers: Iterable[str] = (), title: str | None = None) -> Table:
    """Return an empty table in the style of all commands: a line below the headings, no frame.

    numbers: headings of further columns, which are aligned on the right and do not wrap.
    """
    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title=title, title_justify="left")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def facts_table(rows: Iterable[tuple[str, str | Text]], width: int | None = None) -> Table:
    """Return a table of names and texts. width: columns of the names; None for those of the longest."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", width=width, no_wrap=width is None)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text) if isinstance(text, str) else text)
    return table


def refuse_unwritable(*paths: Path | None) -> None:
    """Raise PlannerError if one of the paths cannot be written. None is ignored."""
    for path in paths:
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir() or path.is_dir() or not os.access(folder, os.W_OK):
            raise PlannerError(f"cannot write {path}: give a file in a writable folder")


def make_folder(folder: Path, remedy: str) -> None:
    """Make a folder for files unless it is there. Raises PlannerError with the `remedy` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise PlannerError(f"cannot write into '{folder}' ({reason}): {remedy}")


def write(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises PlannerError.
    """
    try:
        write_text(path, text)
    except OSError as error:
        raise PlannerError(f"cannot write {path}: {error.strerror}") from None
