"""Finds the samples of a tar file, by its headers alone or with a checksum of every image."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitpar.data.images import IMAGE_TYPES
from vitpar.data.shards.manifest import ROW
from vitpar.data.shards.tar import content, members, open_tar
from vitpar.errors import DataError, literal, shown
from vitpar.files import parse_json
from vitpar.limits import MAX_IMAGE_BYTES, MAX_LABEL_BYTES

EXTENSIONS = (*IMAGE_TYPES, "jpeg", "tiff")


@dataclass(frozen=True)
class Labels:
    """Where labels are: a member ``KEY.cls`` with a whole number, the `field` of a member ``KEY.json``, or the name of
    the `folder` that the image is in, which is then the name of its class."""

    kind: str = "cls"
    field: str = "label"

    def __str__(self) -> str:
        return f"json:{self.field}" if self.kind == "json" else self.kind

    @property
    def extension(self) -> str | None:
        """Of the member that holds the label."""
        return None if self.kind == "folder" else self.kind

    @classmethod
    def parse(cls, text: str) -> Labels:
        """From ``cls``, ``json``, ``json:FIELD`` or ``folder``. Raises DataError for anything else."""
        kind, _, field = text.partition(":")
        if kind not in ("cls", "json", "folder") or (field and kind != "json"):
            raise DataError(f"unknown place of labels '{shown(text)}': use cls, json:FIELD or folder")
        return cls(kind, field or "label")


@dataclass(frozen=True)
class Scan:
    """rows: ROW [samples] in the order of the file, with column `shard` at 0. classes: the names that labels number,
    None where they are numbers themselves."""

    rows: np.ndarray
    classes: list[str] | None = None


def scan(shard: Path, labels: Labels = Labels(), *, checksums: bool = True) -> Scan:
    """Find the samples of a tar file. An image and its label are paired by their key, as webdataset does: all of a
    member's name up to the first dot of its last part.

    checksums: whether the images are read; without, column `crc` is 0. Raises DataError for a file that is no whole tar
    file, a member without its partner, two of one key, an image of no bytes, a label that is no whole number.
    """
    samples: dict[str, tuple[int, int, int]] = {}
    found: dict[str, int | str] = {}
    with open_tar(shard) as file:
        for member in members(file):
            folder, slash, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            key, extension = folder + slash + stem, extension.lower()
            wanted = extension in EXTENSIONS or extension == labels.extension
            if not member.isreg() or stem == "" or not wanted:
                continue
            where = f"'{shard.name}/{shown(member.name)}'"
            if key in (samples if extension in EXTENSIONS else found):
                raise DataError(f"{where} has the key of another sample before it: give every sample its own")
            if extension == labels.extension:
                if member.size > MAX_LABEL_BYTES:
                    raise DataError(f"label {where} has {member.size:,} bytes: it can have {MAX_LABEL_BYTES:,}")
                found[key] = label_of(content(file, member), labels, where)
                continue
            if not 0 < member.size <= MAX_IMAGE_BYTES:
                raise DataError(
                    f"image {where} has {member.size:,} bytes: remove it, or replace it by one of up to "
                    f"{MAX_IMAGE_BYTES:,}"
                )
            crc = zlib.crc32(content(file, member)) if checksums else 0
            samples[key] = member.offset_data, member.size, crc
            if labels.kind == "folder":
                if folder in ("", "."):
                    raise DataError(f"image {where} is in no folder, which would be its class")
                found[key] = folder.rpartition("/")[2]
    for these, others, partner in ((samples, found, f"label (.{labels.extension})"), (found, samples, "image")):
        lonely = next((key for key in these if key not in others), None)
        if lonely is not None:
            raise DataError(f"sample '{shard.name}/{shown(lonely)}' has no {partner}")
    return _table(samples, found)


def offsets(shard: Path) -> set[int]:
    """Return where the data of each member of a tar file begin. Raises DataError where it is no whole tar file."""
    with open_tar(shard) as file:
        return {member.offset_data for member in members(file)}


def _table(samples: dict[str, tuple[int, int, int]], found: dict[str, int | str]) -> Scan:
    classes = sorted({label for label in found.values() if isinstance(label, str)})
    number = {name: place for place, name in enumerate(classes)}
    rows = np.zeros(len(samples), ROW)
    for place, (key, (offset, size, crc)) in enumerate(samples.items()):
        label = found[key]
        rows[place] = 0, number[label] if isinstance(label, str) else label, offset, size, crc
    return Scan(rows, classes or None)


def label_of(data: bytes, labels: Labels, where: str) -> int:
    """The label in `data`, the bytes of the member `where`. Raises DataError where there is none."""
    value: object = data
    if labels.kind == "json":
        try:
            value = parse_json(data)[labels.field]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{where} has no field '{shown(labels.field)}': name another as in json:FIELD") from None
    try:
        if not isinstance(value, bytes | int | str) or isinstance(value, bool):
            raise ValueError
        label = int(value)
    except ValueError:
        raise DataError(f"label {literal(value)} of {where} is not a whole number") from None
    if not 0 <= label < 1 << 31:
        raise DataError(f"label {shown(label)} of {where} is not from 0 to {(1 << 31) - 1}")
    return label
