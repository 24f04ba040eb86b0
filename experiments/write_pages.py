"""Write the pages of docs/ that come from the source.

python experiments/write_pages.py      # make docs
"""

from collections.abc import Callable
from pathlib import Path

from pages import architecture, commands, defaults, recipes, settings, support

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "architecture": architecture.page,
    "commands": commands.page,
    "defaults": defaults.page,
    "recipes": recipes.page,
    "settings": settings.page,
    "support": support.page,
}
"""Functions that return a page, by its name in docs/."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / f"{name}.md").write_text(page())
