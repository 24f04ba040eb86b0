"""Report docstrings, comments and class names that are hard to understand.

    python experiments/lint_language.py [FOLDER …]      # seconds; default: src, cli, tests, experiments

Reports docstrings that open with "What …" or "Of …" instead of a verb or the name of the thing, phrases that other
projects do not use, and classes of the packages that share a name. Exit code 1 if it reports anything.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "cli", "tests", "experiments")
PACKAGES = ("src", "cli")
"""Folders whose class names must be unique. Tests and experiments may repeat names."""
OPENINGS = re.compile(r"(What|Of|That|The same|For|Now|Nobody|Nothing|In words|As)\b")
PHRASES = re.compile(
    r"\b(nobody|mends?|mended|came to an end|comes to an end|goes? on where|told otherwise|is asked for|so much as"
    r"|so much more|as far as (it|they) go|gives? back what|wants to know|what there is|beside theory|is not there)\b",
    re.IGNORECASE,
)
SAME_NAME = frozenset({"Embed", "Block", "Head"})  # the three layers of every family of models
"""Names that several classes may share; give the reason for each in a comment."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, including those below fields and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def findings(folders: list[str]) -> Iterator[str]:
    """Yield `path:line: what is wrong` for the Python files below `folders`, relative to the repository."""
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = sorted(docstrings(tree))
        for line, text in texts:
            if opening := OPENINGS.match(text):
                yield f"{name}:{line}: docstring opens with '{opening[0]}': begin with a verb or name the thing"
        for line, text in sorted([*texts, *comments(path)]):
            if (phrase := PHRASES.search(text)) and path != Path(__file__).resolve():
                yield f"{name}:{line}: '{phrase[0]}': say it in plain technical English"
        if name.parts[0] in PACKAGES:
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes[node.name].append(f"{name}:{node.lineno}")
    for shared, places in classes.items():
        if len(places) > 1 and shared not in SAME_NAME:
            yield f"{', '.join(places)}: these classes are all called {shared}: one name, one meaning"


def main() -> int:
    """Print the findings; return 1 if there are any."""
    found = list(findings(sys.argv[1:] or list(FOLDERS)))
    print("\n".join([*found, f"{len(found)} findings"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
