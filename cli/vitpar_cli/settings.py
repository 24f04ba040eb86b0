"""`vitpar settings`: the reference of all recipe settings."""

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from vitpar.recipe import reference
from vitpar_cli import recipe_options as o


def settings(
    key: str | None = typer.Argument(None, metavar="KEY", help="A setting, such as train.batch_size, or a section."),
    as_json: o.AsJson = False,
) -> None:
    """Print settings of recipes: type, default and effect.

    Example: vitpar settings optimizer

    Example: vitpar settings train.precision
    """
    listed = list(reference.settings()) if key is None else reference.find(key)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in listed]))
        return
    console, section = Console(highlight=False), ""
    for one in listed:
        name = one.key.partition(".")[0]
        if name != section:
            console.print(f"{chr(10) * bool(section)}[bold]\\[{name}][/bold]  {reference.about(name)}")
            section = name
        console.print(f"\n[bold]{one.key}[/bold]  {escape(f'{one.kind}, default {one.default}')}")
        console.print(Padding(one.effect, (0, 0, 0, 4)), markup=False)
