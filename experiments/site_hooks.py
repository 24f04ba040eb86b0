"""mkdocs hooks of the documentation site: files of the repository outside docs/ become pages.

Pages of docs/ link to such files by relative paths, which work in a checkout. The site gets a page for each linked
file: Markdown is rendered, other text is shown as code, a folder becomes a list of its files. Large files are copied.
"""

import os
import posixpath
import re
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
TOP_LEVEL = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the navigation that are files in the repository's root."""
FOLDER = "repository"
"""Folder of the site for all other files outside docs/."""
MAX_SHOWN_BYTES = 100_000
"""Size up to which a file is shown as a page; larger files are copied."""
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".sbatch": "bash", ".yml": "yaml", ".json": "json"}
"""Language of the syntax colors, by a file's suffix."""

_FENCE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)[ \t]*$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()([^()\s#]+)((?:#[^()\s]*)?\))")


def _target(source: str, link: str) -> str | None:
    """Return the path, relative to the checkout, that a link leads to; None if it is a URL or not a file.

    source: path of the page that has the link, relative to the checkout.
    """
    if re.match(r"[a-z][a-z0-9+.-]*:|/", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(link)))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def _links(source: str, text: str) -> set[str]:
    """Return the files outside docs/ that a Markdown page links to."""
    prose = "".join(_FENCE.split(text)[::2])
    targets = {_target(source, match[2]) for match in _LINK.finditer(prose)}
    return {target for target in targets if target and not target.startswith("docs/")}


def _rewrite(source: str, place: str, text: str, places: dict[str, str]) -> str:
    """Return a page's Markdown with links to places in the site.

    source: path of the page, relative to the checkout.
    place: its path in the site's sources.
    places: path in the site's sources of each file outside docs/.
    """

    def replace(match: re.Match[str]) -> str:
        target = _target(source, match[2])
        if target is None:
            return match[0]
        found = target.removeprefix("docs/") if target.startswith("docs/") else places[target]
        return match[1] + posixpath.relpath(found, posixpath.dirname(place) or ".") + match[3]

    parts = _FENCE.split(text)
    parts[::2] = [_LINK.sub(replace, part) for part in parts[::2]]
    return "".join(parts)


def _is_shown(path: Path) -> bool:
    """Return whether a file is shown as a page."""
    return path.stat().st_size <= MAX_SHOWN_BYTES and b"\0" not in path.read_bytes()


def _entries(folder: Path) -> list[Path]:
    """Return what a folder's page lists: everything but hidden files and caches, folders first."""
    found = [path for path in folder.iterdir() if not path.name.startswith((".", "__pycache__"))]
    return sorted(found, key=lambda path: (path.is_file(), path.name))


def _place(path: str) -> str:
    """Return the path in the site's sources of a file or folder outside docs/."""
    if path in TOP_LEVEL:
        return TOP_LEVEL[path]
    full = ROOT / path
    if full.is_dir():
        return f"{FOLDER}/{path}/index.md"
    if path.endswith(".md") or not _is_shown(full):
        return f"{FOLDER}/{path}"
    return f"{FOLDER}/{path}.md"


def _page(path: str, places: dict[str, str]) -> str:
    """Return the Markdown of the page for a file or folder outside docs/."""
    full, place = ROOT / path, places[path]
    if path.endswith(".md"):
        return _rewrite(path, place, full.read_text(), places)
    heading = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if full.is_dir():
        lines = []
        for entry in _entries(full):
            link = posixpath.relpath(places[f"{path}/{entry.name}"], posixpath.dirname(place))
            lines.append(f"- [{entry.name}{'/' * entry.is_dir()}]({link})\n")
        return heading + "".join(lines)
    text = full.read_text()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{heading}{fence}{LANGUAGES.get(full.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def _find_places(sources: dict[str, str]) -> dict[str, str]:
    """Return the place in the site of each file outside docs/ that a page needs, directly or through another page.

    sources: Markdown of the pages of docs/, by their path relative to the checkout.
    """
    waiting = set(TOP_LEVEL).union(*(_links(path, text) for path, text in sources.items()))
    places: dict[str, str] = {}
    while waiting:
        path = waiting.pop()
        places[path] = _place(path)
        full = ROOT / path
        if full.is_dir():
            needed = {f"{path}/{entry.name}" for entry in _entries(full)}
        else:
            needed = _links(path, full.read_text()) if path.endswith(".md") else set()
        waiting |= needed - set(places)
    return places


_places: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of files outside docs/."""
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    _places.clear()
    _places.update(_find_places(pages))
    for path, place in sorted(_places.items()):
        inclusion = InclusionLevel.INCLUDED if path in TOP_LEVEL else InclusionLevel.NOT_IN_NAV
        if place.endswith(".md"):
            file = File.generated(config, place, content=_page(path, _places), inclusion=inclusion)
        else:
            file = File.generated(config, place, abs_src_path=os.fspath(ROOT / path), inclusion=inclusion)
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point a page's links to files outside docs/ to their pages in the site."""
    if page.file.generated_by:  # its links already lead to places in the site
        return markdown
    return _rewrite(f"docs/{page.file.src_uri}", page.file.src_uri, markdown, _places)
