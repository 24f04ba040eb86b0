"""The documentation site builds without warnings, its links resolve, and its pages load nothing from the network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from helpers.paths import ROOT

LOADING = {"audio", "embed", "iframe", "img", "input", "link", "object", "script", "source", "track", "video"}
"""Tags whose attributes name files that a browser loads by itself."""
FOREIGN = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
STYLE_LOADS = re.compile(r"""(?:url\(|@import)\s*["']?((?:[a-z]+:)?//[^"')\s]*)""", re.IGNORECASE)


class Page(HTMLParser):
    """Links, anchors and loaded files of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.classes: set[str] = set()
        self.feed(text)
        self.loaded += STYLE_LOADS.findall(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record what a tag links to, loads and names."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.classes |= {*given.get("class", "").split()}
        if tag in LOADING:
            sources = [given[name] for name in ("src", "href", "data", "poster") if name in given]
            sources += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
            self.loaded += sources
            self.links += sources
        elif "href" in given:
            self.links.append(given["href"])


def broken_links(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Return the links of all pages that lead to no file or no anchor of the site."""
    found = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = path if not url.path else (path.parent / unquote(url.path)).resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.is_relative_to(site) or not target.is_file():
                found.append(f"{path.relative_to(site)}: {link}")
            elif (
                url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors | {"__comments"}
            ):
                found.append(f"{path.relative_to(site)}: {link} (no such anchor)")
    return found


def read_pages(site: Path) -> dict[Path, Page]:
    """Return all pages of a site."""
    return {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name, reason=f"{name} is missing: pip install -c constraints.txt -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """The pages of the built site."""
    return read_pages(site)


@pytest.mark.tools
def test_every_page_is_there(site: Path, pages: dict[Path, Page]) -> None:
    built = {path.relative_to(site).as_posix() for path in pages}
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert sources <= built
    assert {"changelog.html", "contributing.html"} <= built


@pytest.mark.tools
def test_links_and_anchors_resolve(site: Path, pages: dict[Path, Page]) -> None:
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert broken_links(site, pages) == []


@pytest.mark.tools
def test_pages_load_nothing_from_the_network(site: Path, pages: dict[Path, Page]) -> None:
    loaded = {(path.name, source) for path, page in pages.items() for source in page.loaded}
    assert [found for found in loaded if FOREIGN.match(found[1])] == []
    styles = {path.name: STYLE_LOADS.findall(path.read_text()) for path in site.rglob("*.css")}
    assert styles and not any(styles.values())
    # The theme's script loads these from the network if a page has them.
    assert not any(page.classes & {"mermaid", "md-source"} for page in pages.values())


@pytest.mark.tools
def test_the_search_index_is_local(site: Path) -> None:
    assert '"location"' in (site / "search" / "search_index.json").read_text()


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("other.html", False),
        ("other.html#here", False),
        ("https://pytorch.org/", False),
        ("missing.html", True),
        ("other.html#nowhere", True),
        ("#nowhere", True),
        ("../outside.html", True),
    ],
)
def test_broken_links_are_found(tmp_path: Path, link: str, broken: bool) -> None:
    (tmp_path / "index.html").write_text(f'<p><a href="{link}">link</a></p>')
    (tmp_path / "other.html").write_text('<h1 id="here">Other</h1>')
    assert bool(broken_links(tmp_path, read_pages(tmp_path))) == broken


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        ('<script src="https://host/a.js"></script>', True),
        ('<link rel="stylesheet" href="//host/a.css">', True),
        ('<style>@import "https://host/a.css";</style>', True),
        ('<p style="background: url(https://host/a.png)"></p>', True),
        ('<img srcset="a.png 1x, https://host/b.png 2x">', True),
        ('<a href="https://host/">host</a><script src="a.js"></script>', False),
    ],
)
def test_foreign_files_are_found(text: str, loads: bool) -> None:
    assert any(FOREIGN.match(source) for source in Page(text).loaded) == loads
