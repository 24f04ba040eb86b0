"""Checks of HTML pages: well-formed, self-contained, and what they contain."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "input", "br", "img"}
"""Elements without an end."""


def data_of(html: str) -> dict[str, Any]:
    """Return the data that the script of a page draws."""
    return json.loads(gzip.decompress(base64.b64decode(html.partition('id="data">')[2].partition("<")[0])))


def charts_of(html: str) -> dict[str, dict[str, Any]]:
    """Return what a page draws, by title; the second chart of a title has -1 behind it, and so on."""
    charts = data_of(html)["charts"]
    return {chart["place"].removeprefix("chart-").removesuffix("-0"): chart for chart in charts}


class Page(HTMLParser):
    """Parsed page.

    Raises AssertionError for an element that is not closed in order.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.styles: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} repeats an attribute"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element without content."""
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Close an element."""
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        """Note a text."""
        inside = self.open[-1] if self.open else ""
        {"style": self.styles, "script": self.scripts}.get(inside, self.words).append(data)

    @property
    def text(self) -> str:
        """Visible text."""
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements called `tag`."""
        return [attrs for name, attrs in self.elements if name == tag]

    @property
    def outside(self) -> list[str]:
        """URLs that the page would load or lead to, without embedded images."""
        names = ("src", "href", "xlink:href", "action", "formaction", "data", "poster", "srcset", "background")
        found = [value or "" for _, attrs in self.elements for name, value in attrs.items() if name in names]
        styles = [*self.styles, *(attrs.get("style") or "" for _, attrs in self.elements)]
        found += [text for style in styles for text in re.findall(r"url\(.*?\)|@import.*", style)]
        # A name has no more than 253 letters: the packed library has // often, and no dot.
        found += re.findall(r"https?://\S+|//[\w.-]{1,253}\.\S+", " ".join(self.scripts))
        return [url for url in found if not url.startswith("data:image/")]
