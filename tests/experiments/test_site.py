"""The documentation site builds without warnings, and its pages load nothing from the network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

LOADS = re.compile(
    r"""<(?:audio|embed|iframe|img|input|link|object|script|source|track|video)\b[^>]*?"""
    r"""\b(?:src|srcset|href|data|poster)=["']?[^"'>]*?(?:[a-z][a-z0-9+.-]*:)?//"""
    r"""|(?:url\(|@import)\s*["']?(?:[a-z]+:)?//""",
    re.IGNORECASE,
)
"""Pattern of files that a browser loads from another place, in HTML and CSS."""


@pytest.mark.tools
def test_site_builds_without_warnings_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    """Broken links and anchors are warnings (mkdocs.yml, validation)."""
    for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name, reason=f"{name} is missing: pip install -c constraints.txt -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    assert {"changelog.html", "contributing.html", "search"} <= {path.name for path in tmp_path.iterdir()}
    texts = {path: path.read_text() for kind in ("html", "css") for path in tmp_path.rglob(f"*.{kind}")}
    assert {path: found[0] for path, text in texts.items() if (found := LOADS.search(text))} == {}
    # The theme's script loads these from the network if a page has them.
    assert not any(re.search(r'class="[^"]*\b(mermaid|md-source)(?!_)\b', text) for text in texts.values())


def test_foreign_files_are_found() -> None:
    for text in (
        '<script src="https://host/a.js"></script>',
        '<link rel="stylesheet" href="//host/a.css">',
        '<style>@import "https://host/a.css";</style>',
        '<img srcset="a.png 1x, https://host/b.png 2x">',
    ):
        assert LOADS.search(text), text
    assert not LOADS.search('<a href="https://host/">host</a><script src="a.js"></script>')
