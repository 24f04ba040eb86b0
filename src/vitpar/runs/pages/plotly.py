"""Charts of a page that Plotly draws: their places, their data, and the scripts, compressed."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitpar.errors import DataError
from vitpar.runs.pages.document import document, table, toggles


@dataclass(frozen=True)
class Key:
    """An entry of a chart's legend: a button that shows or hides the traces of its name."""

    name: str
    """Name of the traces; `bands` for all error bars."""
    colour: str
    """Colour, or those of the light and the dark theme with `|` between them."""
    mark: str = "■"
    """Character that is shown in the colour."""

    @property
    def html(self) -> str:
        """Text of the button."""
        colour = f"light-dark({self.colour.replace('|', ', ')})" if "|" in self.colour else self.colour
        return f'<b class="mark" style="color:{colour}">{self.mark}</b>{escape(self.name)}'


@dataclass(frozen=True)
class Figure:
    """A chart of a page."""

    title: str
    """Title."""
    data: Mapping[str, Any]
    """Drawing for the page's script: `lines` of runs, or `traces` and a `layout` as Plotly reads them."""
    heads: Sequence[str] = ()
    """Headings of the table of key points, the first of the names of its rows; empty for no table."""
    rows: Sequence[Sequence[str]] = ()
    """Rows of that table, as text. Screen readers say them as the description of the chart."""
    notes: Sequence[str] = ()
    """Sentences below the chart."""
    keys: Sequence[Key] = ()
    """Legend; empty for charts that have one for all on the page."""
    height: int = 240
    """Height in pixels."""

    @property
    def words(self) -> str:
        """Description: title, key points and notes."""
        points = (
            f"{name}: {', '.join(f'{head} {cell}' for head, cell in zip(self.heads[1:], cells, strict=True) if cell)}."
            for name, *cells in self.rows
        )
        return " ".join((f"{self.title}.", *points, *filter(None, self.notes)))


class Charts:
    """Charts of a page, and what its script needs to draw them. more: data besides those of the charts."""

    def __init__(self, **more: Any) -> None:
        self._more = more
        self._charts: list[dict[str, Any]] = []

    def add(self, figure: Figure) -> str:
        """Return the HTML of a chart: title, place of the drawing with its description, notes, key points."""
        # The place of a chart stays the same when a live page is made again.
        again = sum(chart["title"] == figure.title for chart in self._charts)
        place = f"chart-{figure.title}-{again}"
        self._charts.append({"title": figure.title, "place": place, **figure.data})
        notes = "".join(f'<p class="note">{escape(text)}</p>' for text in figure.notes if text)
        cells = [list(map(escape, row)) for row in figure.rows]
        points = f"<details><summary>Key points</summary>{table(figure.heads, cells)}</details>" if cells else ""
        keys = toggles({escape(f"{place}/{key.name}"): key.html for key in figure.keys}) if figure.keys else ""
        return (
            f'<figure class="chart"><figcaption>{escape(figure.title)}</figcaption>{keys}'
            f'<div class="plot" id="{escape(place)}" role="img" aria-label="{escape(figure.words)}" '
            f'style="height:{figure.height}px"></div>{notes}{points}</figure>'
        )

    @property
    def data(self) -> dict[str, Any]:
        """Data of the charts for the page's script, for JSON."""
        return {**self._more, "charts": self._charts}

    def page(self, title: str, parts: Sequence[str], style: str = "", version: str = "") -> str:
        """Return the complete page.

        parts: HTML of its main part, which a live page replaces.
        style, version: as for ``vitpar.runs.pages.document.document``.

        Raises DataError if Plotly is not installed.
        """
        data = packed(json.dumps(self.data, allow_nan=False, separators=(",", ":")))
        body = (
            "<noscript><p>The charts need JavaScript. The tables do not.</p></noscript>"
            f"<main>{''.join(parts)}{_block('data', data)}</main>{_block('library', _packed_library())}"
        )
        script = Path(__file__).with_name("charts.js").read_text(encoding="utf-8")
        return document(title, body, style, script, library(), version)


def _block(name: str, content: str) -> str:
    """Return data for the page's script."""
    return f'<script type="application/octet-stream" id="{name}">{content}</script>'


@cache
def library() -> str:
    """Return the text of Plotly's script. Raises DataError if Plotly is not installed."""
    spec = find_spec("plotly")
    if spec is None or not spec.origin:
        raise DataError("charts need Plotly, which is not installed: pip install -e '.[report]'")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def packed(text: str) -> str:
    """Return a text compressed, in characters that have no meaning in HTML."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


@cache
def _packed_library() -> str:
    return packed(library())
