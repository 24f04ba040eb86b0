"""`vitpar models`, `vitpar recipes` and `vitpar settings`: what a recipe can name."""

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from vitpar.errors import ModelError
from vitpar.models import ModelConfig, model_config
from vitpar.models.families import FAMILIES, common_tp, kinds, options, published, size
from vitpar.planner.training_time import CLUSTER, MESH, gpu_hours, hours
from vitpar.recipe import reference
from vitpar.recipe.file import shipped_recipe, shipped_recipes
from vitpar.recipe.sections.input import ModelSection
from vitpar.text import shown
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import data_table, print_json, print_rows
from vitpar_cli.profiled import InputRate

if TYPE_CHECKING:
    from rich.table import Table

FORWARD = "GFLOPs are of the forward of one image or sequence: matrix products, a multiply-add counts as two."
"""Explanation of the FLOPs."""


def models(
    name: str | None = typer.Argument(
        None,
        metavar="NAME",
        help="A model, or a model of your own as FILE.py:NAME; or a family, a part of names or a pattern, which "
        "shortens the list.",
        callback=o.own_model,
    ),
    as_json: o.AsJson = False,
) -> None:
    """List the published models of all families or those of some names, or show the layers and options of one.

    FLOPs are those of the forward of one image or sequence: matrix products, where a multiply-add counts as two.

    Example: vitpar models

    Example: vitpar models 'base*dinov3'

    Example: vitpar models vit_base_patch16_224
    """
    known = name is not None and any(family.knows(name) for family in FAMILIES.values())
    listed = [] if known else [size(config) for config in published(name or "")]
    if name is not None and not listed:
        if not known and {*"*?["} & {*name}:
            raise ModelError(f"no published name has a part like '{shown(name)}': `vitpar models` lists all")
        _show_one(model_config(name), as_json)
        return
    if as_json:
        print_json({"models": listed})
        return
    table, family = _table("model", "parameters", "GFLOPs", "tokens", "image"), ""
    for one in listed:
        if family not in ("", one["family"]):
            table.add_section()
        family, numbers = one["family"], (_millions(one["parameters"]), _giga(one["forward_flops"]))
        tokens = _span(*one["tokens"]).replace(" to ", "-")  # the longest names leave no room for more
        table.add_row(one["name"], *numbers, tokens, f"{one['image_size']}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{FORWARD}\nOther patch and image sizes of a family are names too: docs/models.md.")
    if name is None:
        console.print("A part of names shortens the list: vitpar models dinov3.")


def _show_one(config: ModelConfig, as_json: bool) -> None:
    """Print the size of a model, its kinds of layers, and its options."""
    whole, layers, tp = size(config), kinds(config), common_tp(config)
    own = ModelSection.model_fields
    settings = [
        {"key": f"model.{'' if key in own else 'options.'}{key}", "value": getattr(config, key), "effect": effect}
        for key, effect in options(config).items()
    ]
    if as_json:
        print_json({**whole, "tp": tp, "layers": layers, "options": settings})
        return
    console = Console(highlight=False)
    facts = {
        "model": f"{config.name}, family {config.FAMILY}",
        "parameters": f"{config.parameters:,}",
        "GFLOPs": _giga(whole["forward_flops"]),
        "takes": config.words[0] + (f", {config.channels} channels" if config.channels else ""),
        "gives": config.words[1],
        "tokens": f"{_span(*whole['tokens'])}, of {_span(*whole['features'])} features",
        "tp": f"{_degrees(tp)} divide all layers" if tp else "no degree divides all layers",
    }
    print_rows(console, facts.items())
    table = _table("kind", "layers", "parameters", "GFLOPs", "gives", "tp")
    for kind in layers:
        shape, degrees = f"{kind['tokens']:,} x {kind['features']:,}", kind["tp"]
        tp_words = "any" if degrees is None else _degrees(degrees) if degrees else "none"
        numbers = _millions(kind["parameters"]), _giga(kind["forward_flops"])
        table.add_row(kind["kind"], kind["layers"], *numbers, shape, tp_words)
    table.columns[-1].justify = "left"
    console.print()
    console.print(table)
    console.print(f"Parameters and GFLOPs of one layer; tokens x features that it gives.\n{FORWARD}")
    for setting in settings:
        value = "unset" if setting["value"] is None else json.dumps(setting["value"])
        console.print(f"\n[bold]{setting['key']}[/bold]  {escape(value)}")
        if setting["effect"]:
            console.print(Padding(setting["effect"], (0, 0, 0, 4)), markup=False)


def _table(*headings: str) -> "Table":
    """Return a table whose first column may wrap, and whose numbers are aligned on the right."""
    table = data_table(*headings)
    for column in table.columns:
        column.overflow = "fold"
        column.justify = "left" if column.header in ("model", "kind", "layers") else "right"
    return table


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e5 else f"{number:,}"


def _giga(flops: int) -> str:
    return f"{flops / 1e9:,.1f}" if flops >= 1e8 else f"{flops / 1e9:.2g}"


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _degrees(degrees: tuple[int, ...]) -> str:
    """Return degrees for a narrow column: the first few, and the largest."""
    words = [str(degree) for degree in degrees]
    return ", ".join(words if len(words) <= 5 else [*words[:3], "…", words[-1]])


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
    predicted = partial(gpu_hours, images_per_second=images_per_second)
    if as_json:
        print_json(
            {"recipes": [{"name": one.name, **asdict(one.about), "gpu_hours": predicted(one)} for one in listed]}
        )
        return
    console = Console(highlight=False)
    if name is None:
        timed = images_per_second is not None  # a prediction describes models, which takes seconds
        table = data_table("recipe", "training", "published", "here", *["GPU-hours"] * timed)
        table.columns[0].no_wrap, table.columns[0].min_width = True, max(len(one.name) for one in listed)
        for one in listed:
            here = one.about.here.rpartition("; ")[2]
            times = [hours(predicted(one))] if timed else []
            table.add_row(one.name, one.about.title, one.about.published, here, *times)
        console.print(table)
        console.print(
            "published: by the source; here: by vitpar. Source, duration and file of one: vitpar recipes deit_small"
        )
        return
    (one,) = listed
    waiting = "" if images_per_second else ", without waiting for images (--images-per-second)"
    facts = {
        "source": one.about.source,
        "published": one.about.published,
        "here": one.about.here,
        "GPU-hours": f"{hours(predicted(one))}, predicted for {CLUSTER} under {MESH}{waiting}",
        "train": f"vitpar train --recipe {name} --data {one.recipe().data.path} --mesh {MESH}",
    }
    print_rows(console, facts.items())
    typer.echo(f"\n{one.path.read_text()}", nl=False)


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
        print_json([asdict(one) for one in listed])
        return
    console, section = Console(highlight=False), ""
    for one in listed:
        name = one.key.partition(".")[0]
        if name != section:
            console.print(f"{chr(10) * bool(section)}[bold]\\[{name}][/bold]  {reference.about(name)}")
            section = name
        console.print(f"\n[bold]{one.key}[/bold]  {escape(f'{one.kind}, default {one.default}')}")
        console.print(Padding(one.effect, (0, 0, 0, 4)), markup=False)
