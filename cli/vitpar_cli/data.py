"""`vitpar data`: pack images into shards, and say what shards hold."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    help="Pack images into shards, and say what shards hold.\n\nExample: vitpar data pack digits data_shards/digits",
    short_help="Pack images into shards, and say what shards hold.",
)

CLASSES_SHOWN = 20  # a longer table of classes would hide the rest


@app.command("pack")
def pack_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A folder with train/CLASS/ and val/CLASS/, or with CLASS/ alone; a folder with train.zip, val.zip, "
            "train_map.txt and val_map.txt; or the word `digits`.",
        ),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.")],
    val_fraction: Annotated[
        float | None,
        typer.Option(help="Part of every class that becomes `val` when SRC has no such split.", show_default="0.2"),
    ] = None,
    shard_samples: Annotated[int, typer.Option(help="Images in a shard.")] = 5000,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Decides the carved split and how shards mix the classes.")
    ] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the data set in DST.")] = False,
) -> None:
    """Pack images into WebDataset shards, byte for byte, with an index beside them.

    Example: vitpar data pack digits data_shards/digits
    """
    from vitpar.data import pack, survey

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def progress(split: str, done: int, total: int) -> None:
            if split not in tasks:
                tasks[split] = bar.add_task(split, total=total)
            if done % 100 == 0 or done == total:
                bar.update(tasks[split], completed=done)

        pack(
            source,
            destination,
            val_fraction=val_fraction,
            shard_samples=shard_samples,
            seed=seed,
            overwrite=overwrite,
            progress=progress,
        )
    _print_survey(survey(destination))


@app.command("info")
def info_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder made by `vitpar data pack`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a packed data set holds: splits, samples, shards, bytes, image sizes and classes.

    Example: vitpar data info data_shards/digits
    """
    from vitpar.data import survey

    found = survey(folder)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _print_survey(found)


def _print_survey(found: dict[str, Any]) -> None:
    console = Console()
    splits = found["splits"]
    console.print(found["folder"], markup=False, soft_wrap=True)
    table = Table("split", "samples", "shards", "size", "width", "height")
    for name, split in splits.items():
        width, height = (_span(split[side]) for side in ("width", "height"))
        table.add_row(name, f"{split['samples']:,}", str(split["shards"]), decimal(split["bytes"]), width, height)
    console.print(table)
    classes = Table("label", "class", *splits)
    for label, name in enumerate(found["classes"][:CLASSES_SHOWN]):
        classes.add_row(str(label), escape(name), *(f"{split['per_class'][label]:,}" for split in splits.values()))
    console.print(classes)
    hidden = len(found["classes"]) - CLASSES_SHOWN
    if hidden > 0:
        console.print(f"and {hidden:,} more classes; --json lists them all")


def _span(limits: list[int]) -> str:
    low, high = limits
    return str(low) if low == high else f"{low}–{high}"
