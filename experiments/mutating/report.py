"""Progress lines, result table and list of problems of a mutation campaign."""

from __future__ import annotations

from textwrap import shorten

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mutating.campaign import Campaign, Result
from mutating.command import Outcome

Ended = Outcome | Result
"""Outcome of a command or a mutation."""

COLOURS = {"passed": "green", "caught": "green", "not run": "yellow"}
"""Colours of words in the column `result`; all others are red."""

SHOWN = 140
"""Most characters of a verdict in the table."""


def coloured(word: str) -> str:
    """Return the word with rich markup for its colour."""
    return f"[{COLOURS.get(word, 'red')}]{word}[/]"


def verdict(result: Result) -> str:
    """Return the outcome of a mutation in one word."""
    if result.caught:
        return "caught"
    kinds = [outcome.kind for _, outcome in result.tried]
    return next((kind for kind in ("crash", "hang") if kind in kinds), "MISSED" if kinds else "not run")


def progress(done: int, total: int, name: str, ended: Ended) -> str:
    """Return the progress line of a command or mutation that ended."""
    if isinstance(ended, Outcome):
        return f"clean source {done}/{total}  {coloured(ended.kind)}  {ended.seconds:3.0f} s  {escape(name)}"
    command = escape(ended.caught[0]) if ended.caught else ""
    return f"mutation {done}/{total}  {coloured(verdict(ended))}  {ended.seconds:3.0f} s  {name}  {command}".rstrip()


def table(campaign: Campaign) -> Table:
    """Return a table with a row for each mutation."""
    rows = Table(box=None)
    rows.add_column("mutation", no_wrap=True)
    rows.add_column("result", no_wrap=True)
    rows.add_column("s", justify="right")
    rows.add_column("by", overflow="fold")
    rows.add_column("which said", overflow="fold")
    for result in campaign.results:
        command, outcome = result.caught or ("", None)
        words = escape(shorten(outcome.words, SHOWN, placeholder=" …")) if outcome else ""
        mutation = result.mutation.name
        rows.add_row(mutation, coloured(verdict(result)), f"{result.seconds:.0f}", escape(command), words)
    return rows


def problems(campaign: Campaign) -> list[str]:
    """Return messages for commands that fail on the unchanged source and mutations that were not caught."""
    found = []
    for command, outcome in campaign.clean.items():
        if outcome.kind != "passed":
            found.append(f"{outcome.kind.upper()} on the clean source: {command}\n  {outcome.words}")
    for result in campaign.results:
        if not result.caught:
            lines = [f"{verdict(result).upper()} {result.mutation.name}: {result.mutation.breaks}"]
            lines += [f"  {command}\n    {outcome.kind}: {outcome.words}" for command, outcome in result.tried]
            unusable = set(result.mutation.caught_by) - {command for command, _ in result.tried}
            lines += [f"  {command}\n    not run: it does not pass on the clean source" for command in sorted(unusable)]
            found.append("\n".join(lines))
    return found


def show(console: Console, campaign: Campaign, seconds: float) -> None:
    """Print the table, the problems and a summary.

    seconds: wall time of the campaign.
    """
    console.print()
    console.print(table(campaign))
    for words in problems(campaign):
        console.print(f"\n{escape(words)}", highlight=False, soft_wrap=True)
    caught = sum(result.caught is not None for result in campaign.results)
    console.print(
        f"\n{caught} of {len(campaign.results)} mutations caught, {len(campaign.clean)} commands on the clean source, "
        f"{seconds / 60:.1f} minutes",
        highlight=False,
    )
