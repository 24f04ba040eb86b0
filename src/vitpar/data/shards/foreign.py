"""An index for tar shards that others wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np

from vitpar.data.shards.manifest import MANIFEST, Manifest, ShardEntry, write_manifest, write_split
from vitpar.data.shards.scan import Labels, Scan, scan
from vitpar.data.sources.source import check_number_of_classes
from vitpar.data.split_names import split_of
from vitpar.errors import DataError, shown
from vitpar.files import read_json
from vitpar.limits import MAX_CLASSES

Progress = Callable[[str, int, int], None]
"""Called as (split, shards scanned, shards in all)."""


def index(
    folder: str | Path,
    *,
    splits: Mapping[str, str] | None = None,
    labels: Labels = Labels(),
    classes: Sequence[str] | None = None,
    workers: int = 2,
    progress: Progress | None = None,
) -> Manifest:
    """Index the tar files in `folder`, beside them. Every image is read once, for its checksum.

    splits: for each split a pattern of file names. None: what stands before the last number of a name,
    ``imagenet-train-000012.tar`` in `train` and ``val_3.tar`` in `val`. labels: where they are. classes: names in label
    order, None for those that the shards or an index before this one give, or numbers. workers: shards scanned at once.
    Raises DataError as `scan` does; for no shards, a folder that cannot be written, a label beyond `classes`.
    """
    folder = Path(folder)
    files = _files(folder, splits)
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="vitpar-index") as pool:
        found = {}
        for split, paths in files.items():
            scans = []
            for done, scanned in enumerate(pool.map(lambda path: scan(path, labels), paths), start=1):
                scans.append(scanned)
                if progress:
                    progress(split, done, len(paths))
            found[split] = scans
    known = _known(folder, "classes")
    names = _classes([one for scans in found.values() for one in scans], classes, known)
    check_number_of_classes(names)
    tables = {
        split: [_numbered(one, names, path) for one, path in zip(scans, files[split], strict=True)]
        for split, scans in found.items()
    }
    entries = {}
    try:
        for split, rows in tables.items():
            shards = [
                ShardEntry(file=path.name, samples=len(table), bytes=path.stat().st_size)
                for path, table in zip(files[split], rows, strict=True)
            ]
            entries[split] = write_split(folder, split, shards, rows, len(names))
        class_names = _known(folder, "class_names") if names == known else None
        manifest = Manifest(classes=names, class_names=class_names, labels=str(labels), splits=entries)
        write_manifest(folder, manifest)
    except OSError as error:
        raise DataError(
            f"cannot write the index into '{folder}': {error.strerror}; where it cannot be beside the shards, make a "
            "folder of links to them and index that"
        ) from error
    return manifest


def _files(folder: Path, splits: Mapping[str, str] | None) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    if not folder.is_dir():
        raise DataError(f"no folder '{folder}' to index: give the one that the shards are in")
    if splits is None:
        for path in sorted(folder.glob("*.tar")):
            rest = re.sub(r"([-_.]*([0-9]+|of))*$", "", path.stem)
            found.setdefault(split_of(path.name) or rest or "train", []).append(path)
    else:
        for split, pattern in splits.items():
            if Path(split).name != split or Path(pattern).name != pattern:
                raise DataError(f"'{split}={pattern}' must be a name and a pattern of file names, without folders")
            found[split] = sorted(folder.glob(pattern))
    empty = next((split for split, paths in found.items() if not paths), None)
    if empty is not None and splits is not None:
        raise DataError(f"no files '{splits[empty]}' in '{folder}' for the split '{empty}'")
    if not found:
        packed = any(folder.glob("*.tar.*")) or any(folder.glob("*.tgz"))
        raise DataError(
            f"no .tar files in '{folder}'" + (": unpack the compressed ones, within which nothing has a place" * packed)
        )
    return found


def _known(folder: Path, key: Literal["classes", "class_names"]) -> list[str] | None:
    """Those of a data set that is there already, of whatever version."""
    try:
        names = read_json(folder / MANIFEST)[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _classes(scans: Sequence[Scan], given: Sequence[str] | None, known: Sequence[str] | None) -> list[str]:
    named = [one.classes for one in scans if one.classes is not None]
    found = sorted({name for names in named for name in names})
    if given is None and found:
        return found
    most = max((int(one.rows["label"].max()) for one in scans if len(one.rows)), default=-1) + 1
    if given is None and known is not None and most <= len(known):
        return list(known)
    if given is None:
        if most > MAX_CLASSES:
            raise DataError(f"label {most - 1} of the shards is above {MAX_CLASSES - 1}: is --label the right one?")
        return [str(label) for label in range(most)]
    unknown = next((name for name in found if name not in given), None)
    if unknown is not None:
        raise DataError(f"class '{shown(unknown)}' of the shards is not among the {len(given)} that are named")
    if not found and most > len(given):
        raise DataError(f"label {most - 1} of the shards is beyond the {len(given)} classes that are named")
    return list(given)


def _numbered(scanned: Scan, classes: Sequence[str], path: Path) -> np.ndarray:
    if not len(scanned.rows):
        raise DataError(f"shard '{path}' holds no images with labels: remove it, or say where labels are with --label")
    if scanned.classes is not None:
        place = {name: number for number, name in enumerate(classes)}
        scanned.rows["label"] = np.array([place[name] for name in scanned.classes])[scanned.rows["label"]]
    return scanned.rows
