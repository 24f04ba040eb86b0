"""All commands and their options, from the same texts as `--help`."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.cli import get_docs_for_click

from vitpar_cli.main import app

HEAD = """# Command line

All commands and their options, as `vitpar COMMAND --help` prints them. Written by `make docs` from the commands
(`cli/vitpar_cli`). Options that set a recipe's key have the meaning and the default of that key
([settings.md](settings.md)).

Exit codes: 0 for success, 1 for a failure, 2 for an error that the user must fix. `vitpar train` exits with 75 after it
was asked to stop and has saved a checkpoint ([machines.md](machines.md)).

"""


def page() -> str:
    """Return the page."""
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="vitpar")
    text = get_docs_for_click(obj=command, ctx=context, name="vitpar").replace("# `vitpar`", "## `vitpar`", 1)
    return HEAD + re.sub("^Example: (.*)$", r"Example: `\1`", text, flags=re.MULTILINE).rstrip() + "\n"
