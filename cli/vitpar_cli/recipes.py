"""`vitpar recipes`: list the shipped recipes, or show one."""

import json
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import data_table
from vitpar_cli.profiled import InputRate


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A shipped recipe, to show its file.")] = None,
    images_per_second: InputRate = None,
    as_json: o.AsJson = False,
) -> None:
    """List the shipped recipes with the results that were published, or show one.

    GPU-hours are predicted for a machine of eight H100 under dp8, without evaluation, and without waiting for images
    unless their rate is given.

    Example: vitpar recipes

    Example: vitpar recipes deit_small
    """
    from vitpar.planner.recipe_page import CLUSTER, MESH, gpu_hours, hours
    from vitpar.training.recipe.shipped import shipped_recipe, shipped_recipes

    predicted = partial(gpu_hours, images_per_second=images_per_second)
    listed = shipped_recipes() if name is None else [shipped_recipe(name)]
    if as_json:
        rows = [{"name": one.name, **asdict(one.about), "gpu_hours": predicted(one)} for one in listed]
        typer.echo(json.dumps({"recipes": rows}))
        return
    console = Console(highlight=False)
    if name is None:
        table = data_table("recipe", "training", "published", "here", "GPU-hours")
        table.columns[0].no_wrap, table.columns[0].min_width = True, max(len(one.name) for one in listed)
        for one in listed:
            here = one.about.here.rpartition("; ")[2]
            table.add_row(one.name, one.about.title, one.about.published, here, hours(predicted(one)))
        console.print(table)
        console.print("published: by the source; here: by vitpar. Source and file of one: vitpar recipes deit_small")
        return
    (one,) = listed
    about = one.about
    for word, text in (("source", about.source), ("published", about.published), ("here", about.here)):
        typer.echo(f"{word:<10} {text}")
    waiting = "" if images_per_second else ", without waiting for images (--images-per-second)"
    typer.echo(f"{'GPU-hours':<10} {hours(predicted(one))}, predicted for {CLUSTER} under {MESH}{waiting}")
    typer.echo(f"{'train':<10} vitpar train --recipe {name} --data {one.recipe().data.path} --mesh {MESH}")
    typer.echo(f"\n{one.path.read_text()}", nl=False)
