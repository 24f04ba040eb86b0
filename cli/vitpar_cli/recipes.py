"""`vitpar recipes`: list the shipped recipes, or show one."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import typer
from rich.console import Console

from vitpar.planner.training_time import CLUSTER, MESH, gpu_hours, hours
from vitpar.recipe.file import ShippedRecipe, shipped_recipe, shipped_recipes
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import data_table
from vitpar_cli.profiled import InputRate


def recipes(
    name: str | None = typer.Argument(None, metavar="NAME", help="A shipped recipe, to show its file."),
    images_per_second: InputRate = None,
    as_json: o.AsJson = False,
) -> None:
    """List the shipped recipes with the results that were published, or show one with its file and duration.

    GPU-hours are predicted for a machine of eight H100 under dp8, without evaluation, and without waiting for images
    unless their rate is given. They are shown of one recipe, and of all with that rate, with --json and in the docs.

    Example: vitpar recipes

    Example: vitpar recipes deit_small
    """
    listed = shipped_recipes() if name is None else [shipped_recipe(name)]
    if name is None and images_per_second is None and not as_json:  # a prediction describes models, which takes seconds
        _list(listed, [])
        return
    predicted = partial(gpu_hours, images_per_second=images_per_second)
    if as_json:
        rows = [{"name": one.name, **asdict(one.about), "gpu_hours": predicted(one)} for one in listed]
        typer.echo(json.dumps({"recipes": rows}))
        return
    if name is None:
        _list(listed, [hours(predicted(one)) for one in listed])
        return
    (one,) = listed
    about = one.about
    for word, text in (("source", about.source), ("published", about.published), ("here", about.here)):
        typer.echo(f"{word:<10} {text}")
    waiting = "" if images_per_second else ", without waiting for images (--images-per-second)"
    typer.echo(f"{'GPU-hours':<10} {hours(predicted(one))}, predicted for {CLUSTER} under {MESH}{waiting}")
    typer.echo(f"{'train':<10} vitpar train --recipe {name} --data {one.recipe().data.path} --mesh {MESH}")
    typer.echo(f"\n{one.path.read_text()}", nl=False)


def _list(listed: Sequence[ShippedRecipe], gpu_hours: Sequence[str]) -> None:
    """Print the table of recipes. gpu_hours: of each; empty to leave them out."""
    console = Console(highlight=False)
    table = data_table("recipe", "training", "published", "here", *["GPU-hours"] * bool(gpu_hours))
    table.columns[0].no_wrap, table.columns[0].min_width = True, max(len(one.name) for one in listed)
    for number, one in enumerate(listed):
        here = one.about.here.rpartition("; ")[2]
        table.add_row(one.name, one.about.title, one.about.published, here, *gpu_hours[number : number + 1])
    console.print(table)
    console.print(
        "published: by the source; here: by vitpar. Source, duration and file of one: vitpar recipes deit_small"
    )
