"""Packing of images and text with progress, as commands do it."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from vitpar.data.shards.pack import SKIPPED, Reencode, pack
from vitpar.data.sources import Source, open_source
from vitpar.data.text.pack import open_all
from vitpar.data.text.pack import pack_text as pack_documents
from vitpar.launch.resources import cpu_cores
from vitpar.terminal import say
from vitpar.text import count, printable
from vitpar_cli.data_view import print_survey
from vitpar_cli.outputs import progress_bar, warn


@contextmanager
def packing_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show progress on stderr, and yield the callback (split, done, total) that moves it."""
    with progress_bar("packing") as moved:
        yield lambda split, done, total: moved(done, total, split)


def pack_images(source: str, seed: int, destination: Path | None = None, dry_run: bool = False, **given: Any) -> None:
    """Pack images with the options that were given, or only print what was found."""

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
    if destination is None or dry_run:
        left_out = ("shard_samples", "overwrite")
        opened = open_all(source, tokens, **{name: value for name, value in given.items() if name not in left_out})
        say(printable("\n".join(opened.describe())))
        return
    with packing_progress() as progress:
        pack_documents(
            source,
            destination,
            tokens,
            seed=seed,
            progress=progress,
            opened=lambda text: say(printable("\n".join(text.describe()))),
            **given,
        )
    print_survey(destination)
