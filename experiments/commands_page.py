"""The page of all commands and their options, from the same texts as `--help`.

python experiments/commands_page.py > docs/commands.md      # make docs
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from vitpar_cli.main import app

HEAD = """# Command line

All commands and their options, as `vitpar COMMAND --help` prints them. Written by `make docs` from the commands
(`cli/vitpar_cli`). Options that set a recipe's key have the meaning and the default of that key
([settings.md](settings.md)).

Exit codes: 0 for success, 1 for a failure, 2 for an error that the user must fix. `vitpar train` exits with 75 after it
was asked to stop and has saved a checkpoint ([machines.md](machines.md)).
"""
OPTIONS = "Options"
"""Heading of the options that name no other one."""


def _escaped(text: str) -> str:
    """Return help text as Markdown: typer's markup with brackets escaped."""
    return re.sub(r"(?<!\\)\[", r"\\[", " ".join(text.split()))


def _rows(params: list[Any], context: Any) -> Iterator[str]:
    """Yield a list item for each parameter."""
    for param in params:
        record = param.get_help_record(context)
        if record is not None:
            names, text = record
            yield f"- `{names}`: {_escaped(text)}" if text else f"- `{names}`"


def _usage(command: Any, context: Any) -> str:
    """Return the usage line of a command."""
    return " ".join([context.command_path, *command.collect_usage_pieces(context)])


def _section(command: Any, context: Any, level: int) -> Iterator[str]:
    """Yield the lines of a command's section, without its subcommands."""
    paragraphs = [" ".join(part.split()) for part in (command.help or "").strip().split("\n\n")]
    examples = [text.removeprefix("Example: ") for text in paragraphs if text.startswith("Example: ")]
    yield f"{'#' * level} {context.command_path}\n"
    yield from (f"{_escaped(text)}\n" for text in paragraphs if text and not text.startswith("Example: "))
    yield "```"
    yield _usage(command, context)
    yield "```\n"
    if examples:
        yield "Example:\n" if len(examples) == 1 else "Examples:\n"
        yield "\n".join(["```", *examples, "```\n"])
    panels: dict[str, list[Any]] = {}
    for param in command.params:
        if param.param_type_name == "argument":
            panels.setdefault("Arguments", []).append(param)
    for param in command.params:
        if param.param_type_name == "option":
            panels.setdefault(getattr(param, "rich_help_panel", None) or OPTIONS, []).append(param)
    for title, params in panels.items():
        rows = list(_rows(params, context))
        if rows:
            yield f"**{title}**\n"
            yield "\n".join(rows) + "\n"


def _walk(command: Any, context: Any, depth: int = 0) -> Iterator[str]:
    """Yield the lines of a command and its subcommands."""
    yield from _section(command, context, max(2, 1 + depth))
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _walk(inner, type(context)(inner, info_name=name, parent=context), depth + 1)


def markdown() -> str:
    """Return the page."""
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="vitpar")
    return "\n".join([HEAD, *_walk(command, context)]).rstrip() + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
