"""Plotly's script for pages, compressed, and the script that draws with it."""

from __future__ import annotations

import base64
import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from vitpar.errors import DataError


@cache
def library() -> str:
    """Return the text of Plotly's script.

    Raises DataError if Plotly is not installed.
    """
    spec = find_spec("plotly")
    if spec is None or not spec.origin:
        raise DataError("charts need Plotly, which is not installed: pip install 'vitpar[report]'")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


@cache
def drawing() -> str:
    """Return the script that draws the charts of a page."""
    return Path(__file__).with_name("charts.js").read_text(encoding="utf-8")


def packed(text: str) -> str:
    """Return a text compressed, in characters that have no meaning in HTML."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


@cache
def packed_library() -> str:
    """Return Plotly's script compressed."""
    return packed(library())
