"""Commands in README and docs are parsed as the command line would: none has an option that does not exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.exceptions import TyperException

from vitpar_cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))))
GENERATED = ("docs/commands.md",)
"""Pages that print `--help` itself."""


def commands(page: str) -> Iterator[list[str]]:
    """Yield the arguments of every `vitpar` command in the code blocks of a page."""
    for block in re.findall(r"^```[a-z]*\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"vitpar [a-z]+ ", line) and "|" not in line and "…" not in line:
                yield shlex.split(line, comments=True)[1:]


def parse(arguments: list[str]) -> None:
    """Parse a command line without running the command."""
    command = typer.main.get_command(app)
    context = command.make_context("vitpar", list(arguments))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, context._protected_args + context.args)
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED and list(commands(page))])
def test_every_documented_command_is_understood(page: str) -> None:
    wrong = []
    for arguments in commands(page):
        try:
            parse(arguments)
        except TyperException as error:
            wrong.append(f"vitpar {shlex.join(arguments)}: {error}")
    assert not wrong, "\n".join(wrong)


def test_commands_with_unknown_options_are_noticed() -> None:
    with pytest.raises(TyperException, match="--meshes"):
        parse(["train", "--meshes", "dp2"])
