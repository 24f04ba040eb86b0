"""Finds the samples of a tar file, by its headers alone or with a checksum of every image."""

from __future__ import annotations

import json
import os
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitpar.data.images import IMAGE_TYPES
from vitpar.data.shards.manifest import ROW
from vitpar.errors import DataError

LARGEST = 1 << 31  # bytes of an image; more is a mistake
EXTENSIONS = (*IMAGE_TYPES, "jpeg", "tiff")
_LABEL_BYTES = 1 << 20


@dataclass(frozen=True)
class Labels:
    """Where labels are: a member ``KEY.cls`` with a whole number, the `field` of a member ``KEY.json``, or the name of
    the `folder` that the image is in, which is then the name of its class."""

    kind: str = "cls"
    field: str = "label"

    @property
    def extension(self) -> str | None:
        """Of the member that holds the label."""
        return None if self.kind == "folder" else self.kind

    @classmethod
    def parse(cls, text: str) -> Labels:
        """From ``cls``, ``json``, ``json:FIELD`` or ``folder``. Raises DataError for anything else."""
        kind, _, field = text.partition(":")
        if kind not in ("cls", "json", "folder") or (field and kind != "json"):
            raise DataError(f"unknown place of labels '{text}': use cls, json:FIELD or folder")
        return cls(kind, field or "label")


@dataclass(frozen=True)
class Scan:
    """rows: ROW [samples] in the order of the file, with column `shard` at 0. classes: the names that labels number,
    None where they are numbers themselves."""

    rows: np.ndarray
    classes: list[str] | None = None


def scan(shard: Path, labels: Labels = Labels()) -> Scan:
    """The samples of a tar file. An image and its label are paired by their key, as webdataset does: all of a member's
    name up to the first dot of its last part.

    Raises DataError for a file that is no whole tar file, a member without its partner, two of one key, an image of no
    bytes, a label that is no whole number.
    """
    samples: dict[str, tuple[int, int, int]] = {}
    found: dict[str, int | str] = {}
    try:
        with tarfile.open(shard, "r:") as tar, shard.open("rb") as file:
            for member in tar:
                folder, slash, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                key, extension = folder + slash + stem, extension.lower()
                wanted = extension in EXTENSIONS or extension == labels.extension
                if not member.isreg() or stem == "" or not wanted:
                    continue
                where = f"'{shard.name}/{member.name}'"
                if key in (samples if extension in EXTENSIONS else found):
                    raise DataError(f"{where} has the key of another sample before it: give every sample its own")
                if extension == labels.extension:
                    found[key] = label_of(_read(file.fileno(), member, min(member.size, _LABEL_BYTES)), labels, where)
                    continue
                if not 0 < member.size < LARGEST:
                    raise DataError(f"image {where} has {member.size} bytes: remove it or replace it")
                data = _read(file.fileno(), member, member.size)
                samples[key] = member.offset_data, member.size, zlib.crc32(data)
                if labels.kind == "folder":
                    if folder in ("", "."):
                        raise DataError(f"image {where} is in no folder, which would be its class")
                    found[key] = folder.rpartition("/")[2]
            if os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"it does not end properly at byte {tar.offset}")
    except tarfile.TarError as error:
        raise DataError(f"'{shard}' is not a whole tar file ({error}): fetch or write it again") from None
    except OSError as error:
        raise DataError(f"cannot read '{shard}': {error.strerror}") from None
    for these, others, partner in ((samples, found, f"label (.{labels.extension})"), (found, samples, "image")):
        lonely = next((key for key in these if key not in others), None)
        if lonely is not None:
            raise DataError(f"sample '{shard.name}/{lonely}' has no {partner}")
    return _table(samples, found)


def _table(samples: dict[str, tuple[int, int, int]], found: dict[str, int | str]) -> Scan:
    classes = sorted({label for label in found.values() if isinstance(label, str)})
    number = {name: place for place, name in enumerate(classes)}
    rows = np.zeros(len(samples), ROW)
    for place, (key, (offset, size, crc)) in enumerate(samples.items()):
        label = found[key]
        rows[place] = 0, number[label] if isinstance(label, str) else label, offset, size, crc
    return Scan(rows, classes or None)


def _read(descriptor: int, member: tarfile.TarInfo, size: int) -> bytes:
    data = os.pread(descriptor, size, member.offset_data)
    if len(data) != size:
        raise tarfile.ReadError("unexpected end of data")
    return data


def label_of(data: bytes, labels: Labels, where: str) -> int:
    """The label in `data`, the bytes of the member `where`. Raises DataError where there is none."""
    value: object = data
    if labels.kind == "json":
        try:
            value = json.loads(data)[labels.field]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{where} has no field '{labels.field}': name another as in json:FIELD") from None
    try:
        if not isinstance(value, bytes | int | str) or isinstance(value, bool):
            raise ValueError
        label = int(value)
    except ValueError:
        raise DataError(f"label {value!r:.80} of {where} is not a whole number") from None
    if not 0 <= label < 1 << 31:
        raise DataError(f"label {label} of {where} is not from 0 to {(1 << 31) - 1}")
    return label
