"""Entry point of the command line, `vitpar`.

Each command or command group has its own file. This file combines them and prints user errors as one sentence.
"""

import os
import sys
from typing import Any

import typer
from typer.core import TyperOption
from typer.exceptions import TyperException

from vitpar.errors import UserError
from vitpar.io import user_path
from vitpar_cli import (
    bench,
    board,
    check,
    checkpoint,
    copy,
    data,
    doctor,
    evaluate,
    features,
    galvatron,
    models,
    plan,
    predict,
    probe,
    profile,
    recipes,
    report,
    runs,
    scaling,
    search,
    settings,
    train,
    validate,
)
from vitpar_cli.program import run_program
from vitpar_cli.usage import sentence

app = typer.Typer(
    name="vitpar",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("features")(features.features)
app.command("probe")(probe.probe)
app.command("plan")(plan.plan)
app.command("check")(check.check)
app.command("bench")(bench.bench)
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("copy")(copy.copy)
app.add_typer(profile.app, name="profile")
app.command("search")(search.search)
app.command("scaling")(scaling.scaling)
app.command("validate")(validate.validate)
app.add_typer(galvatron.app, name="galvatron")
app.command("models")(models.models)
app.command("recipes")(recipes.recipes)
app.command("settings")(settings.settings)
app.command("report")(report.report)
app.command("runs")(runs.runs)
app.command("board")(board.board)
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
        raise UserError(sentence(error)) from None


def main() -> None:
    """Run the console script."""
    run_program(_run)


if __name__ == "__main__":
    main()
