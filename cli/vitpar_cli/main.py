"""Entry point of the command line, `vitpar`.

Each command or command group has its own file. This file combines them and prints user errors as one sentence.
"""

import os
import re
import sys
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperOption
from typer.exceptions import TyperException

from vitpar.errors import RecipeError, UserError
from vitpar.io import user_path
from vitpar.text import nearest, shown
from vitpar_cli import (
    bench,
    check,
    checkpoint,
    data,
    doctor,
    evaluate,
    galvatron,
    models,
    plan,
    probe,
    profile,
    runs,
    scaling,
    search,
    train,
    validate,
)
from vitpar_cli.program import run_program

_POSITIONAL = {"train": "--mesh", "check": "--mesh", "bench": "--mesh", "eval": "--checkpoint"}
"""Option, by command, whose value users give as a positional argument by mistake."""
app = typer.Typer(
    name="vitpar",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("predict")(evaluate.predict)
app.command("features")(evaluate.features)
app.command("probe")(probe.probe)
app.command("plan")(plan.plan)
app.command("check")(check.check)
app.command("bench")(bench.bench)
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("copy")(data.copy)
app.add_typer(profile.app, name="profile")
app.command("search")(search.search)
app.command("scaling")(scaling.scaling)
app.command("validate")(validate.validate)
app.add_typer(galvatron.app, name="galvatron")
app.command("models")(models.models)
app.command("recipes")(models.recipes)
app.command("settings")(models.settings)
app.command("report")(runs.report)
app.command("runs")(runs.runs)
app.command("board")(runs.board)
app.command("doctor")(doctor.doctor)


# Help would have <bool> behind each flag, and the bounds of numbers such as [0<=x<=9223372036854775807].
if hasattr(TyperOption, "display_type_rich"):
    _type_words = TyperOption.display_type_rich
    _plainly: Any = TyperOption
    _plainly.display_type_rich = lambda self, ctx: None if self.is_flag else _type_words(self, ctx)
    _plainly._get_number_range_help_str = lambda self: None


def _print_version(wanted: bool) -> None:
    if wanted:
        from vitpar import __version__

        typer.echo(f"vitpar {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of user errors too."),
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Train Vision Transformers on any mesh of devices in pure PyTorch.

    Example: vitpar train --mesh pp2xtp2xdp2
    """
    if debug:
        os.environ["VITPAR_DEBUG"] = "1"


def _run() -> int:
    """Run the command on the command line and return its exit code.

    Raises UserError for a command line that typer refuses.
    """
    sys.argv[1:] = map(user_path, sys.argv[1:])  # shells leave the ~ of --run-dir=~/run
    try:
        return app(prog_name="vitpar", standalone_mode=False) or 0
    except typer.Abort:
        return 1
    except TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is already printed
            return 2
        raise UserError(_sentence(error)) from None


def _sentence(error: TyperException) -> str:
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
        name = _POSITIONAL.get(context.info_name if context else "")
        remedy = f"give it as {name} {shown(extra[1])}" if name else f"see `{command} --help`"
        return f"unexpected argument {shown(extra[1])}: {remedy}"
    text = error.format_message().rstrip(".")
    if (name := _POSITIONAL.get(context.info_name if context else "")) and name in text and (given := _positional()):
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


def main() -> None:
    """Run the console script."""
    run_program(_run)


if __name__ == "__main__":
    main()
