"""`vitpar data pack`: pack images or text into shards; `vitpar train` packs a folder of images once."""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vitpar.data.shards.manifest import has_manifest
from vitpar.data.shards.pack import SKIPPED, Reencode, pack
from vitpar.data.sources import open_source
from vitpar.data.sources.imagenet import is_imagenet
from vitpar.data.text.pack import open_all
from vitpar.data.text.pack import pack_text as pack_documents
from vitpar.errors import DataError
from vitpar.io import read_json, write_text
from vitpar.launch.resources import cpu_cores
from vitpar.terminal import say
from vitpar.text import count, printable, size
from vitpar_cli.data_view import Workers, print_survey, refuse_options
from vitpar_cli.outputs import progress_bar, warn

OF_TEXT = ("tokenizer", "documents", "field", "cross_documents")
OF_IMAGES = ("short_side", "quality", "skip_damaged", "no_decode", "workers")
OPTIONS: dict[str, str] = {
    "source": "A folder with train/CLASS/ and val/CLASS/, or with CLASS/ alone; a folder with ImageNet's archives "
    "(ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and the devkit), with train.zip, val.zip, train_map.txt "
    "and val_map.txt, or with Hugging Face's Parquet files; an archive of CIFAR-10 or CIFAR-100; a CSV list with the "
    "columns path and label; or the word `digits`. "
    "With --tokens: a .txt, .jsonl or .parquet file of text, or a folder of these.",
    "val_fraction": "Fraction of each class used as `val` if SRC has no val split; 0: none, runs do not evaluate.  "
    "\\[default: 0.2; text: 0.05]",
    "shard_samples": "Images or sequences per shard.  \\[default: 5000; text: 50000]",
    "short_side": "Resize larger images to this shorter side, as JPEG.  \\[default: unchanged]",
    "quality": "JPEG quality with --short-side, 1 to 100.  \\[default: 90]",
    "seed": "Seed of the split and of the order of images in shards.",
    "skip_damaged": "Leave out files that are damaged or no images; list them in DST/skipped.txt.",
    "dry_run": "Only print what was found in SRC: splits, classes, and what is left out.",
    "no_decode": "Skip the search for damaged images, which decodes each.",
    "tokens": "Pack text, in sequences of at most this many tokens.",
    "tokenizer": "Tokenizer of text: bytes or a tokenizer.json.  \\[default: bytes]",
    "documents": "Content of a document of a .txt file.  \\[default: file]",
    "field": "Field or column with the text in .jsonl and .parquet.  \\[default: text]",
    "cross_documents": "Let sequences of text continue over the ends of documents.",
}
"""Help of the options."""


def option(name: str, *flags: str, **settings: Any) -> Any:
    """Return the option of a parameter with its help."""
    return typer.Option(*flags, help=OPTIONS[name], **settings)


def pack_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help=OPTIONS["source"])],
    destination: Path | None = typer.Argument(None, metavar="DST", help="Folder to create."),
    val_fraction: Annotated[float | None, option("val_fraction")] = None,
    shard_samples: Annotated[int | None, option("shard_samples")] = None,
    short_side: Annotated[int | None, option("short_side")] = None,
    quality: Annotated[int | None, option("quality")] = None,
    seed: Annotated[int, option("seed", min=0, max=2**63 - 1)] = 0,
    workers: Workers = None,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the data set in DST."),
    skip_damaged: Annotated[bool, option("skip_damaged", "--skip-damaged")] = False,
    dry_run: Annotated[bool, option("dry_run", "--dry-run")] = False,
    no_decode: Annotated[bool, option("no_decode", "--no-decode")] = False,
    tokens: Annotated[int | None, option("tokens", min=1)] = None,
    tokenizer: Annotated[str | None, option("tokenizer", metavar="bytes|FILE")] = None,
    documents: Annotated[Literal["file", "paragraph", "line"] | None, option("documents")] = None,
    field: Annotated[str | None, option("field", metavar="NAME")] = None,
    cross_documents: Annotated[bool, option("cross_documents", "--cross-documents")] = False,
) -> None:
    """Pack images, or with --tokens text, into WebDataset shards and write an index of them.

    Images are not re-encoded unless --short-side is given. An interrupted command continues where it stopped when it is
    run again.

    Example: vitpar data pack digits data_shards/digits

    Example: vitpar data pack photos --dry-run

    Example: vitpar data pack corpus.txt data_shards/corpus --tokens 128
    """
    given = {name: value for name, value in locals().items() if value is not None and value is not False}
    if tokens is None:
        refuse_options(given, OF_TEXT, "is for text: add --tokens N, or leave it out")
    else:
        refuse_options(given, OF_IMAGES, "is for images: leave it out, or --tokens")
    if destination is None and not dry_run:
        raise DataError("DST is missing: name the folder to create, or use --dry-run")
    if quality is not None and short_side is None:
        raise DataError(f"--quality {quality} requires --short-side: add it, or leave --quality out")
    (pack_images if tokens is None else pack_text)(**given)


@contextmanager
def packing_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show progress on stderr, and yield the callback (split, done, total) that moves it."""
    with progress_bar("packing") as moved:
        yield lambda split, done, total: moved(done, total, split)


def _say(lines: Iterable[str]) -> None:
    """Print lines, whose names may be of strangers."""
    for line in lines:
        say(printable(line))


def pack_images(source: str, seed: int, destination: Path | None = None, dry_run: bool = False, **given: Any) -> None:
    """Pack images with the options that were given, or only print what was found."""
    if destination is None or dry_run:
        with packing_progress() as progress:
            contents = open_source(source, val_fraction=given.get("val_fraction"), seed=seed, progress=progress)
        _say(contents.describe(source))
        return
    given["decode_images"] = not given.pop("no_decode", False)
    if "short_side" in given:
        given["reencode"] = Reencode(given.pop("short_side"), given.pop("quality", 90))
    given |= {"workers": given.get("workers", cpu_cores()), "opened": lambda found: _say(found.describe(source))}
    with packing_progress() as progress:
        pack(source, destination, seed=seed, progress=progress, **given)
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
        _say(opened.describe())
        return
    given["opened"] = lambda text: _say(text.describe())
    with packing_progress() as progress:
        pack_documents(source, destination, tokens, seed=seed, progress=progress, **given)
    print_survey(destination)


PACKED = Path("data_shards")
"""Folder of the packed data."""
RECORD = "packed_from.json"
"""File in packed data with the folder of the images, and the checksum of its files' names, sizes and times."""


def packed(folder: Path) -> Path:
    """Return packed data of a folder of images, after packing it if needed; other paths unchanged.

    Raises DataError for images that cannot be packed, too little space, and other data in the place of the packed.
    """
    try:
        return _packed(folder)
    except OSError as error:
        raise DataError(f"'{folder}' cannot be packed: {error.filename}: {error.strerror}: correct it") from None


def _packed(folder: Path) -> Path:
    """Do what `packed` does. Raises OSError too."""
    shards = any(folder.glob("*.tar")) and not is_imagenet(folder)  # `vitpar data index` is for these
    if not folder.is_dir() or has_manifest(folder) or not any(folder.iterdir()) or shards:
        return folder
    target, (digest, needed) = PACKED / folder.resolve().name, _files(folder)
    record = {"folder": str(folder.resolve()), "files": digest}
    known = _record(target)
    if known == record:
        say(f"data       {target}, packed from {folder} before; no file has changed since")
        return target
    if target.exists() and known.get("folder") != record["folder"]:
        raise DataError(
            f"'{folder}' would be packed into '{target}', where other data are: run `vitpar data pack {folder} DIR`, "
            "and give --data DIR"
        )
    PACKED.mkdir(exist_ok=True)
    if (free := shutil.disk_usage(PACKED).free) < needed:
        raise DataError(f"packing '{folder}' needs {size(needed)}, but '{PACKED}' has {size(free)} left: free some")
    say(f"packing    {folder} into {target}{', since files changed' if known else ''}")
    with packing_progress() as progress:
        pack(
            folder,
            target,
            overwrite=target.exists(),
            workers=cpu_cores(),
            progress=progress,
            opened=lambda found: _say(found.describe(str(folder))),
        )
    write_text(target / RECORD, json.dumps(record))
    return target


def _files(folder: Path) -> tuple[str, int]:
    """Return a checksum of names, sizes and times of the files in a folder, and the bytes that their shards need."""
    digest, total = hashlib.sha256(), 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(place, name)
            found = os.stat(path)
            line = f"{os.path.relpath(path, folder)} {found.st_size} {found.st_mtime_ns}\n"
            digest.update(line.encode(errors="surrogateescape"))
            total += found.st_size + 2048  # headers and padding of a tar
    return digest.hexdigest(), total


def _record(target: Path) -> dict[str, str]:
    """Return the record in packed data; an empty one if there is none."""
    try:
        record = read_json(target / RECORD) if has_manifest(target) else {}
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
