"""Packing of images and text with progress, as commands do it; `vitpar train` packs a folder of images once."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitpar.data.shards.manifest import has_manifest
from vitpar.data.shards.pack import Reencode, pack
from vitpar.data.sources import open_source
from vitpar.data.sources.imagenet import is_imagenet
from vitpar.data.text.pack import open_all
from vitpar.data.text.pack import pack_text as pack_documents
from vitpar.errors import DataError
from vitpar.io import read_json, write_text
from vitpar.launch.resources import cpu_cores
from vitpar.terminal import say
from vitpar.text import printable, size
from vitpar_cli.outputs import progress_bar


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
    try:
        known = read_json(target / RECORD) if has_manifest(target) else {}
    except (OSError, ValueError):  # other data, or a damaged record
        known = {}
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
