"""griffe extension of the documentation site: docstrings in this project's style as Markdown.

A line `name: meaning` for each parameter becomes a list item, and interpreter sessions become code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_PARAMETERS = re.compile(r"([a-z_][a-z0-9_]*(?:, [a-z_][a-z0-9_]*)*): (.*)")


def _names(obj: griffe.Object) -> set[str]:
    """Return the names that a docstring of `obj` may explain: parameters, fields and attributes."""
    names = set(obj.members)
    function = obj.members.get("__init__") if obj.is_class else obj
    parameters = getattr(function, "parameters", ()) if function is not None and not function.is_alias else ()
    return names | {parameter.name for parameter in parameters}


def as_markdown(text: str, names: set[str]) -> str:
    """Return a docstring as Markdown.

    names: parameters that a line of the docstring may explain.
    """
    paragraphs = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        if lines and lines[0].startswith(">>>"):
            paragraphs.append("\n".join(["```pycon", *lines, "```"]))
            continue
        found, items = [], 0
        for line in lines:
            match = _PARAMETERS.fullmatch(line)
            if match and {*match[1].split(", ")} <= names:
                if found and not items:
                    found.append("")  # a list needs an empty line before it
                items += 1
                listed = ", ".join(f"`{name}`" for name in match[1].split(", "))
                found.append(f"- {listed}: {match[2]}")
            elif items and line.strip():
                found.append(f"    {line.strip()}")
            else:
                found.append(line)
        paragraphs.append("\n".join(found))
    return re.sub(r"::$", ":", "\n\n".join(paragraphs), flags=re.MULTILINE)


def _rewrite(obj: griffe.Object) -> None:
    """Rewrite the docstring of one object."""
    if obj.docstring is not None:
        obj.docstring.value = as_markdown(obj.docstring.value, _names(obj))


class ProjectDocstrings(griffe.Extension):
    """Rewrites the docstrings of a package when it has been loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite the docstring of the package itself."""
        _rewrite(pkg)

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite the docstring of an object inside the package."""
        _rewrite(obj)
