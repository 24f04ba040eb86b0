"""Packing of images and text with progress, as commands do it."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from vitpar.launch.resources import cpu_cores
from vitpar.terminal import say
from vitpar.text import count, printable
from vitpar_cli.data_view import print_survey
from vitpar_cli.outputs import warn

SHOWN_ALWAYS = 1000
"""Total below which the progress bar moves with every item, and not with every 100th item."""


@contextmanager
def packing_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar for every split on stderr, and yield the callback that moves them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def report(split: str, done: int, total: int) -> None:
            if split not in tasks:
                tasks[split] = bar.add_task(split, total=total)
            if done % 100 == 0 or done == total or total < SHOWN_ALWAYS:
                bar.update(tasks[split], completed=done)

        yield report


def pack_images(source: str, seed: int, destination: Path | None = None, dry_run: bool = False, **given: Any) -> None:
    """Pack images with the options that were given, or only print what was found."""
    from vitpar.data.shards.pack import SKIPPED, Reencode, pack
    from vitpar.data.sources import Source, open_source

    def print_contents(contents: Source) -> None:
        for line in contents.describe(source):
            say(printable(line))

    if destination is None or dry_run:
        with packing_progress() as progress:
            contents = open_source(source, val_fraction=given.get("val_fraction"), seed=seed, progress=progress)
        print_contents(contents)
        return
    given["decode_images"] = not given.pop("no_decode", False)
    if "short_side" in given:
        given["reencode"] = Reencode(given.pop("short_side"), given.pop("quality", 90))
    given.setdefault("workers", cpu_cores())
    with packing_progress() as progress:
        pack(source, destination, seed=seed, progress=progress, opened=print_contents, **given)
    print_survey(destination)
    typer.echo(f"train      {shlex.join(['vitpar', 'train', '--data', str(destination)])}")
    listing = destination / SKIPPED
    if listing.exists():
        skipped = listing.read_text().splitlines()
        warn(f"{count(len(skipped), 'image')} left out, listed in '{listing}'; the first: {printable(skipped[0])}")


def pack_text(
    source: str, tokens: int, seed: int, destination: Path | None = None, dry_run: bool = False, **given: Any
) -> None:
    """Pack text with the options that were given, or only print what was found."""
    from vitpar.data.text import pack

    if destination is None or dry_run:
        left_out = ("shard_samples", "overwrite")
        opened = pack.open_all(source, tokens, **{name: value for name, value in given.items() if name not in left_out})
        say(printable("\n".join(opened.describe())))
        return
    with packing_progress() as progress:
        pack.pack_text(
            source,
            destination,
            tokens,
            seed=seed,
            progress=progress,
            opened=lambda text: say(printable("\n".join(text.describe()))),
            **given,
        )
    print_survey(destination)
