"""Progress lines, result table and text of the findings."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fuzzing.hunt import Found, Tally

WORST = ("harness", "program", "crash", "damage", "memory", "hang", "place", "error", "message")
"""Kinds of findings, the most harmful first."""
LINES = 12
"""Lines of a finding that are shown: half from its beginning, half from its end."""


def progress(tallies: Mapping[str, Tally]) -> str:
    """Return one line of progress."""
    begun = [tally for tally in tallies.values() if tally.cases]
    cases, findings = sum(tally.cases for tally in begun), sum(len(tally.found) for tally in begun)
    names = ", ".join(tally.name for tally in begun[-2:])
    return f"{cases:,} cases, {findings} findings, {len(begun)} of {len(tallies)} targets begun (last {names})"


def table(tallies: Mapping[str, Tally]) -> Table:
    """Return the table with a row for each target."""
    rows = Table("target", *(("cases", "accepted", "refused", "slowest s", "largest MiB", "findings")), box=None)
    for column in rows.columns[1:]:
        column.justify = "right"
    for tally in tallies.values():
        share = tally.accepted / tally.cases if tally.cases else 0.0
        rows.add_row(
            tally.name,
            f"{tally.cases:,}",
            f"{share:.0%}",
            f"{1 - share:.0%}" if tally.cases else "",
            f"{tally.slowest:.1f} (case {tally.longest})",
            f"{tally.mib:,.0f}",
            str(len(tally.found)),
        )
    return rows


def findings(tallies: Mapping[str, Tally], whole: bool = False) -> list[str]:
    """Return the findings, most harmful first, each with the command that repeats it.

    whole: show all lines.
    """
    found = [(tally.name, one) for tally in tallies.values() for one in tally.found.values()]
    found.sort(key=lambda pair: WORST.index(pair[1].finding.kind))
    return [_words(name, one, whole) for name, one in found]


def _words(name: str, found: Found, whole: bool) -> str:
    finding = found.finding
    lines = finding.words.split("\n")
    if len(lines) > LINES and not whole:
        lines = [*lines[: LINES // 2], "…", *lines[-LINES // 2 :]]
    alike = f", {found.times} cases alike" if found.times > 1 else ""
    return (
        f"{finding.kind.upper()} {finding.sort} at {finding.where}{alike}\n"
        f"  python experiments/fuzz.py --target {name} --case {found.case}    "
        f"# {found.how[:200]}, {found.bytes:,} bytes\n" + "\n".join(f"    {line:.240}" for line in lines)
    )


def show(console: Console, tallies: Mapping[str, Tally], whole: bool = False) -> None:
    """Print the findings and the table.

    whole: show all lines of each finding.
    """
    for words in findings(tallies, whole):
        writable = words.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be printed
        console.print(f"\n{escape(writable)}", highlight=False, soft_wrap=True)
    console.print()
    console.print(table(tallies))
