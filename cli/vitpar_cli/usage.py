"""Messages for command lines that typer refuses: unknown options, extra arguments, values of the wrong type."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from typing import Any

from typer.exceptions import TyperException

from vitpar.errors import RecipeError
from vitpar.text import nearest, shown

POSITIONAL = {"train": "--mesh", "check": "--mesh", "bench": "--mesh", "eval": "--checkpoint"}
"""Option, by command, whose value users give as a positional argument by mistake."""


def sentence(error: TyperException) -> str:
    """Return a message that says what is wrong and what to do, in vitpar's style."""
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context else "vitpar"
    options = [name for option in context.command.params for name in option.opts] if context else []
    unknown = getattr(error, "option_name", None)
    if unknown is not None and "such option" in error.message:
        return f"{command} has no option {shown(unknown)}{_instead(unknown, options)}"
    if extra := re.search(r"unexpected extra arguments? ?\(?s?\)? \((.*)\)", error.message):
        flags = [name for option in context.command.params if getattr(option, "is_flag", False) for name in option.opts]
        for before, after in pairwise(sys.argv):
            if before in flags and after == extra[1]:
                return f"{before} takes no value: leave {shown(after)} out"
        name = POSITIONAL.get(context.info_name if context else "")
        remedy = f"give it as {name} {shown(extra[1])}" if name else f"see `{command} --help`"
        return f"unexpected argument {shown(extra[1])}: {remedy}"
    text = error.format_message().rstrip(".")
    if (name := POSITIONAL.get(context.info_name if context else "")) and name in text and (given := _positional()):
        return f"unexpected argument {shown(given)}: give it as {name} {shown(given)}"
    return f"{text[:1].lower()}{text[1:]}: see `{command} --help`"


def _positional() -> str | None:
    """Return the first argument of the command if it is no option."""
    arguments = sys.argv[2:3]
    return arguments[0] if arguments and not arguments[0].startswith("-") else None


def _instead(option: str, options: list[str]) -> str:
    """Return a hint such as `: use --set optimizer.lr=VALUE` for a setting, else the nearest option or `--help`."""
    if "--set" in options:
        from vitpar.recipe.reference import find

        try:
            return f": use --set {find(option.lstrip('-').replace('-', '_'))[0].key}=VALUE"
        except RecipeError:
            pass
    return nearest(option, options) or ": see --help"
