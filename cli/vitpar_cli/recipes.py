"""`vitpar recipes`: list the shipped recipes, or show one."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import data_table


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A shipped recipe, to show its file.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """List the shipped recipes with the results that were published, or show one.

    GPU-hours are predicted for eight H100 under dp8, without evaluation and waiting for images.

    Example: vitpar recipes

    Example: vitpar recipes deit_small
    """
    from vitpar.planner.recipe_page import CLUSTER, MESH, gpu_hours, hours
    from vitpar.training.recipe.shipped import shipped_recipe, shipped_recipes

    listed = shipped_recipes() if name is None else [shipped_recipe(name)]
    if as_json:
        rows = [{"name": one.name, **asdict(one.about), "gpu_hours": gpu_hours(one)} for one in listed]
        typer.echo(json.dumps({"recipes": rows}))
        return
    console = Console(highlight=False)
    if name is None:
        table = data_table("recipe", "training", "published", "here", "GPU-hours")
        table.columns[0].no_wrap, table.columns[0].min_width = True, max(len(one.name) for one in listed)
        for one in listed:
            here = one.about.here.rpartition("; ")[2]
            table.add_row(one.name, one.about.title, one.about.published, here, hours(gpu_hours(one)))
        console.print(table)
        console.print("published: by the source; here: by vitpar. Source and file of one: vitpar recipes deit_small")
        return
    (one,) = listed
    about = one.about
    for word, text in (("source", about.source), ("published", about.published), ("here", about.here)):
        typer.echo(f"{word:<10} {text}")
    typer.echo(f"{'GPU-hours':<10} {hours(gpu_hours(one))}, predicted for {CLUSTER} under {MESH}")
    typer.echo(f"{'train':<10} vitpar train --recipe {name} --data {one.recipe().data.path} --mesh {MESH}")
    typer.echo(f"\n{one.path.read_text()}", nl=False)
