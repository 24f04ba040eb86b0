"""Indexing of tar shards: find the samples of each, from headers alone or with a checksum of every image."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitpar.data.classes import check_class_names
from vitpar.data.images import IMAGE_TYPES
from vitpar.data.shards.manifest import ROW, Manifest, read_any_manifest, write_manifest, write_split
from vitpar.data.sources.source import Progress, split_of, whole_number
from vitpar.data.tar import content, members, open_tar
from vitpar.errors import DataError
from vitpar.io import decode_utf8, parse_json
from vitpar.limits import MAX_CLASSES
from vitpar.object_store import ObjectPath
from vitpar.text import literal, shown

EXTENSIONS = (*IMAGE_TYPES, "jpeg", "tiff")
"""Extensions of tar members that are images. One that ends in them, as `image.jpg`, counts if its key has no other."""


def is_image(extension: str) -> bool:
    """Return whether a member with this extension, in lower case, is an image."""
    return extension.rpartition(".")[2] in EXTENSIONS


@dataclass(frozen=True)
class Labels:
    """Place of the labels in tar shards."""

    kind: str = "cls"
    """Kind of place: "cls", "json" or "folder".

    "cls" is a member ``KEY.cls`` or ``KEY.cls.txt``, "json" is a field of a member ``KEY.json``; both hold an integer
    or the name of the class. "folder" is the folder of the image, whose name is then the name of the class.
    """
    field: str = "label"
    """Name of the field, for "json"; dots lead into objects, as in ``meta.label``."""

    def __str__(self) -> str:
        return f"json:{self.field}" if self.kind == "json" else self.kind

    @property
    def extension(self) -> str | None:
        """Extension of the member that holds the label; None for labels from folders."""
        return None if self.kind == "folder" else self.kind

    def has(self, extension: str) -> bool:
        """Return whether a member with this extension, in lower case, holds a label."""
        return self.kind != "folder" and extension in (self.kind, f"{self.kind}.txt")

    @classmethod
    def parse(cls, text: str) -> Labels:
        """Parse ``cls``, ``json``, ``json:FIELD`` or ``folder``. Raises DataError for anything else."""
        kind, _, field = text.partition(":")
        if kind not in ("cls", "json", "folder") or (field and kind != "json"):
            raise DataError(f"unknown label location '{shown(text)}': use cls, json:FIELD or folder")
        return cls(kind, field or "label")


@dataclass(frozen=True)
class Scan:
    """Samples that were found in one shard."""

    rows: np.ndarray
    """Index rows in the order of the file, ROW [samples], with column `shard` set to 0."""
    classes: list[str] | None = None
    """Class names that the labels in `rows` number; None if the labels in the shard are numbers."""

    def numbered(self, classes: Sequence[str]) -> np.ndarray:
        """Return `rows`, with labels changed in place to number `classes`; -1 for a name that is not among them."""
        if self.classes is not None:
            place = {name: number for number, name in enumerate(classes)}
            numbers = np.array([place.get(name, -1) for name in self.classes], np.int32)
            self.rows["label"] = numbers[self.rows["label"]]
        return self.rows


def scan(shard: Path | ObjectPath, labels: Labels = Labels(), *, checksums: bool = True) -> Scan:
    """Find the samples of a tar file.

    An image and its label are paired by their key as in webdataset: a member's path up to the first dot of its file
    name.

    checksums: whether to read the images for their checksums; without, column `crc` is 0.

    Raises DataError for a file that is no complete tar file, an image without a label or a label without an image, two
    samples with one key, an image that is empty, and labels of which some are integers and some names.
    """
    images: dict[str, list[tuple[str, int, int, int]]] = {}  # extension, offset, size and checksum, by key
    found: dict[str, int | str] = {}  # labels by key
    with open_tar(shard) as file:
        for member in members(file):
            folder, slash, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            key, extension = folder + slash + stem, extension.lower()
            if not member.isreg() or stem == "" or not (is_image(extension) or labels.has(extension)):
                continue
            where = f"'{shard.name}/{shown(member.name)}'"
            plain = any(one[0] in EXTENSIONS for one in images.get(key, ()))
            if (plain and extension in EXTENSIONS) or (labels.has(extension) and key in found):
                raise DataError(
                    f"{where} repeats the key '{shown(key)}', which ends at the first dot: make keys unique"
                )
            if labels.has(extension):
                found[key] = label_of(content(file, member), labels, where)
                continue
            if not member.size:
                raise DataError(f"image {where} has 0 bytes: remove it")
            crc = zlib.crc32(content(file, member)) if checksums else 0
            images.setdefault(key, []).append((extension, member.offset_data, member.size, crc))
            if labels.kind == "folder":
                if folder in ("", "."):
                    raise DataError(f"image {where} is not in a class folder: move it into one, or set --label")
                found[key] = folder.rpartition("/")[2]
    samples: dict[str, tuple[int, int, int]] = {}
    for key, parts in images.items():
        # A longer extension, as of `image.jpg`, counts only if there is no plain one.
        chosen = [part for part in parts if part[0] in EXTENSIONS] or parts
        if len(chosen) > 1:
            raise DataError(
                f"key '{shown(key)}' of '{shard.name}' has {len(chosen)} images; keys end at the first dot of a name: "
                "rename them, or keep one"
            )
        samples[key] = chosen[0][1:]
    for these, others, partner in ((samples, found, f"label (.{labels.extension})"), (found, samples, "image")):
        if (lonely := next((key for key in these if key not in others), None)) is not None:
            raise DataError(f"sample '{shard.name}/{shown(lonely)}' has no {partner}")
    if len({*map(type, found.values())}) > 1:
        raise DataError(f"some labels of '{shard.name}' are numbers and some are names: use one of them")
    classes = sorted({label for label in found.values() if isinstance(label, str)})
    number: dict[int | str, int] = {name: place for place, name in enumerate(classes)}
    rows = [(0, number.get(found[key], found[key]), *place) for key, place in samples.items()]
    return Scan(np.array(sorted(rows, key=lambda row: row[2]), ROW), classes or None)


def label_of(data: bytes, labels: Labels, where: str) -> int | str:
    """Return the label in `data`, the bytes of a member: a number, or the name of a class.

    where: name of the member, for messages.

    Raises DataError for data without a valid label.
    """
    try:
        text = decode_utf8(data)
    except ValueError as error:
        raise DataError(f"cannot read the label {where}: {error}") from None
    value: Any = text.strip()
    if labels.kind == "json":
        try:
            value = parse_json(text)
            # A field of this name, or the one that its dots lead to.
            for part in [labels.field] if labels.field in value else labels.field.split("."):
                value = value[part]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{where} has no field '{shown(labels.field)}': name another with json:FIELD") from None
    if isinstance(value, str) and (number := whole_number(value)) is not None:
        value = number
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise DataError(f"label {literal(value)} of {where} is neither a whole number nor a name")
    if isinstance(value, int) and not 0 <= value < 1 << 31:
        raise DataError(f"label {shown(value)} of {where} is outside 0 to {(1 << 31) - 1}")
    return value


def index(
    folder: str | Path,
    *,
    splits: Mapping[str, str] | None = None,
    labels: Labels = Labels(),
    classes: Sequence[str] | None = None,
    workers: int = 2,
    progress: Progress | None = None,
) -> Manifest:
    """Index the tar files in `folder` and write the index there. Every image is read once, for its checksum.

    splits: file name pattern of each split. None derives the split from the file name, by a word such as `train` or
        `val` in it, or else by what precedes its numbers: ``imagenet-train-000012.tar`` belongs to `train` and
        ``val_3.tar`` to `val`.
    labels: place of the labels.
    classes: class names in label order. None takes them from the shards or from an earlier index, or else uses numbers.
    workers: number of shards that are scanned at once.
    progress: called after every shard.

    Raises DataError as `scan` does, for a folder without shards or that cannot be written, and for a label beyond
    `classes`.
    """
    folder = Path(folder)
    old = read_any_manifest(folder)
    if old.get("text") is not None:
        raise DataError(f"'{folder}' holds text, which cannot be indexed again: restore its files or pack it again")
    by_split = dict[str, dict[Path, Scan]]()
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="vitpar-index") as pool:
        for split, paths in _files(folder, splits).items():
            found = by_split[split] = {}
            for path, scanned in zip(paths, pool.map(partial(scan, labels=labels), paths), strict=True):
                found[path] = scanned
                if progress:
                    progress(split, len(found), len(paths))
    scans = {path: scanned for found in by_split.values() for path, scanned in found.items()}
    if (empty := next((path for path, one in scans.items() if not len(one.rows)), None)) is not None:
        raise DataError(f"shard '{empty}' has no labelled images: remove it, or set --label")
    names = _classes([*scans.values()], classes, old.get("classes"))
    check_class_names(names)
    class_names = old.get("class_names") if names == old.get("classes") else None
    try:
        entries = {
            split: write_split(folder, split, [*shards], [one.numbered(names) for one in shards.values()], len(names))
            for split, shards in by_split.items()
        }
        manifest = Manifest(classes=names, class_names=class_names, labels=str(labels), splits=entries)
        write_manifest(folder, manifest)
    except OSError as error:
        raise DataError(
            f"cannot write the index to '{folder}': {error.strerror}; if the folder is read-only, index a "
            "folder of links to its shards"
        ) from error
    return manifest


def _files(folder: Path, splits: Mapping[str, str] | None) -> dict[str, list[Path]]:
    shards: dict[str, list[Path]] = {}
    if not folder.is_dir():
        raise DataError(f"no folder '{folder}' to index: name the folder of the shards")
    if splits is None:
        for path in sorted(folder.glob("*.tar")):
            rest = re.sub(r"([-_.]*([0-9]+|of))*$", "", path.stem)
            shards.setdefault(split_of(path.name) or rest or "train", []).append(path)
    else:
        for split, pattern in splits.items():
            if Path(split).name != split or Path(pattern).name != pattern:
                raise DataError(f"'{split}={pattern}' must be a split name and a file name pattern, without folders")
            shards[split] = sorted(folder.glob(pattern))
            if not shards[split]:
                raise DataError(f"no file in '{folder}' matches '{pattern}' for the split '{split}'")
    if not shards:
        packed = any(folder.glob("*.tar.*")) or any(folder.glob("*.tgz"))
        raise DataError(
            f"no .tar files in '{folder}'"
            + (": decompress the shards, since compressed ones cannot be indexed" * packed)
        )
    return shards


def _classes(scans: Sequence[Scan], given: Sequence[str] | None, known: Sequence[str] | None) -> list[str]:
    """Return the names of classes: those `given`, used in the shards, or `known` from an earlier index, or numbers."""
    used = sorted({name for one in scans for name in one.classes or ()})
    if used and any(one.classes is None for one in scans):
        raise DataError("some shards have numbers as labels and some have names: use one of them")
    most = 0 if used else max(int(one.rows["label"].max()) for one in scans) + 1
    if given is None:
        if most > MAX_CLASSES:
            raise DataError(f"label {most - 1} in the shards is above {MAX_CLASSES - 1}: check --label")
        return used or (list(known) if known is not None and most <= len(known) else [*map(str, range(most))])
    unknown = next((name for name in used if name not in given), None)
    if unknown is not None:
        raise DataError(f"class '{shown(unknown)}' in the shards is not one of the {len(given)} named classes")
    if most > len(given):
        raise DataError(f"label {most - 1} in the shards is outside the {len(given)} named classes")
    return list(given)
