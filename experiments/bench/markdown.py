"""Markdown tables."""

from collections.abc import Iterator, Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table and an empty line; nothing without rows."""
    if rows:
        yield from (f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))
        yield ""
