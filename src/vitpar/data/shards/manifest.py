"""Manifest of a data set and index of each split, which are in the folder of its shards.

folder/
  dataset.json          classes, and for every split its shards with their sample and byte counts
  train-000000.tar …    00000000.cls, 00000000.jpg, 00000001.cls, 00000001.png, …
  train.index.npy       one ROW per sample, in shard order: place of its image, label and checksum
  val-000000.tar …, val.index.npy

Shards of text are files of token ids, train-000000.tokens …: the sequences one after another, without anything between.
The labels in their index are 0 (`vitpar.data.text`).
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, field_validator, model_validator

from vitpar.errors import DataError
from vitpar.io import read_bytes, read_json, write_text
from vitpar.limits import MAX_CLASSES, MAX_TOKENS
from vitpar.object_store import ObjectPath, parse_place
from vitpar.records import Count, Record, first_wrong
from vitpar.text import shown

ROW = np.dtype([("shard", "<i4"), ("label", "<i4"), ("offset", "<i8"), ("size", "<u4"), ("crc", "<u4")])
"""Row of an index: number of the shard, label, byte offset and size of the encoded image, and its CRC-32 (zlib)."""
MANIFEST = "dataset.json"
"""File name of the manifest."""
TOKENS = ".tokens"
"""End of the names of shards of text."""
MAX_VOCABULARY = 1 << 24
"""Tokens in a vocabulary."""
Id = Annotated[int, Field(ge=0, lt=MAX_VOCABULARY)]
"""Number of a token in a vocabulary."""


class ShardEntry(Record):
    """Tar file, or token file, of a split."""

    file: str
    """Path relative to the folder of the data set."""
    samples: Count
    """Number of samples in the file."""
    bytes: Count
    """Size of the file in bytes."""

    @field_validator("file")
    @classmethod
    def _stays_inside(cls, file: str) -> str:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise ValueError(f"the shard '{shown(file)}' is outside the folder")
        return file


class SplitEntry(Record):
    """Split of a data set."""

    shards: list[ShardEntry]
    """Shards in index order."""
    samples: Count
    """Number of samples in all shards."""
    per_class: list[Count] = Field(max_length=MAX_CLASSES)
    """Number of samples of each class, in label order; of text, that of all."""
    index_sha256: str
    """SHA-256 of the index file, in hexadecimal."""


class Specials(Record):
    """Numbers of a vocabulary's special tokens; None for one that it lacks."""

    model_config = ConfigDict(frozen=True)
    pad: Id | None = None
    """Padding."""
    cls: Id | None = None
    """Start of a sequence, as in BERT."""
    sep: Id | None = None
    """End of a segment, as in BERT."""
    mask: Id | None = None
    """Stand-in for a token to predict."""
    eos: Id | None = None
    """End of a sequence or document."""
    unk: Id | None = None
    """Stand-in for text that the vocabulary lacks."""
    sentinels: tuple[Id, ...] = ()
    """T5's `<extra_id_0>`, `<extra_id_1>`, …, in the order of their numbers in the name."""
    others: tuple[Id, ...] = ()
    """Other tokens that the vocabulary marks as special."""

    @property
    def all(self) -> tuple[int, ...]:
        """Numbers of all special tokens, ascending, each once."""
        named = (self.pad, self.cls, self.sep, self.mask, self.eos, self.unk)
        return tuple(sorted({*(number for number in named if number is not None), *self.sentinels, *self.others}))

    @property
    def padding(self) -> int:
        """Number that fills a batch after the end of a sequence: `pad`, or 0 without one."""
        return self.pad or 0

    @property
    def end(self) -> int | None:
        """Token that ends a document or sequence: `eos`, or else `sep`."""
        return self.sep if self.eos is None else self.eos


class TextSection(Record):
    """Section `text` of `dataset.json`."""

    tokens: int = Field(ge=1, le=MAX_TOKENS)
    """Largest number of ids in a sequence."""
    vocab_size: int = Field(ge=1, le=MAX_VOCABULARY)
    """Number of tokens in the vocabulary: the largest id plus 1."""
    dtype: Literal["uint16", "uint32"]
    """Type of the stored ids, little-endian."""
    tokenizer: Literal["bytes", "file"]
    """Kind of tokenizer."""
    tokenizer_file: str | None = None
    """Name of the tokenizer's file in the folder of the data set; None for `bytes`."""
    tokenizer_sha256: str | None = None
    """SHA-256 of that file, in hexadecimal."""
    specials: Specials
    """Special tokens. Sequences contain none of them but `unk`, and `end` between documents."""
    cross_documents: bool
    """Whether sequences continue over the ends of documents."""
    documents: dict[str, Count]
    """Number of documents with at least one token in each split."""
    ids: dict[str, Count]
    """Number of stored ids in each split."""

    @field_validator("tokenizer_file")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and (not name or PurePosixPath(name).name != name or name == ".."):
            raise ValueError(f"the tokenizer '{shown(name)}' is not a file name")
        return name

    @model_validator(mode="after")
    def _specials_are_tokens(self) -> Self:
        if max(self.specials.all, default=0) >= self.vocab_size:
            raise ValueError(f"a special token is outside the vocabulary of {self.vocab_size:,}")
        return self

    @property
    def stored(self) -> np.dtype:
        """Type of the stored ids, little-endian on every machine."""
        return np.dtype(f"<u{np.dtype(self.dtype).itemsize}")


class Manifest(Record):
    """Content of `dataset.json`."""

    vitpar_dataset: Literal[2] = 2
    """Version of the format."""
    classes: list[str] = Field(max_length=MAX_CLASSES)
    """Identifiers of the classes, in label order."""
    class_names: list[str] | None = Field(default=None, max_length=MAX_CLASSES)
    """Human-readable names of the classes, in the same order; None if they do not differ."""
    labels: str
    """Place of the labels in the shards, in the syntax of `vitpar data index --label`."""
    splits: dict[str, SplitEntry]
    """Splits by name."""
    text: TextSection | None = None
    """Tokenizer and counts of a data set of text; None for images."""

    @field_validator("splits")
    @classmethod
    def _names_are_plain(cls, splits: dict[str, SplitEntry]) -> dict[str, SplitEntry]:
        for name in splits:
            if not name or PurePosixPath(name).name != name:
                raise ValueError(f"the split '{shown(name)}' is not a valid file name")
        return splits

    @model_validator(mode="after")
    def _every_class_has_a_name(self) -> Self:
        if self.class_names is not None and len(self.class_names) != len(self.classes):
            raise ValueError(f"{len(self.classes):,} classes have {len(self.class_names):,} names")
        return self


def read_any_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest in `folder`, of any version: its fields that have the expected types.

    It is empty if the file is missing or damaged.
    """
    try:
        found = read_json(folder / MANIFEST)
    except (OSError, ValueError):
        return {}
    known = dict(found) if isinstance(found, dict) else {}
    for key in ("classes", "class_names"):
        if not isinstance(known.get(key), list) or not all(isinstance(name, str) for name in known[key]):
            known.pop(key, None)
    return known


def has_manifest(folder: str | Path | ObjectPath) -> bool:
    """Return whether `folder` has the manifest of a data set.

    Raises DataError for object storage that cannot be asked.
    """
    path = parse_place(folder) / MANIFEST
    try:
        return path.is_file()
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from None


def read_manifest(folder: str | Path | ObjectPath) -> Manifest:
    """Read the manifest of a data set.

    Raises DataError if `folder` has none, or one that is damaged or of another version.
    """
    path = parse_place(folder) / MANIFEST
    try:
        return Manifest.model_validate(read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"no data set at '{folder}': {_how_to_make(path.parent)}") from None
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from None
    except ValueError as error:
        raise DataError(
            f"'{path}' is damaged or from another version ({shown(first_wrong(error))}): rewrite it with "
            f"`vitpar data index {folder}`"
        ) from None


def _how_to_make(folder: Path | ObjectPath) -> str:
    """Return how to make a data set in `folder`, which has none."""
    if isinstance(folder, ObjectPath):
        return f"make one with `vitpar data pack SOURCE DIR`, and copy it with `vitpar copy DIR {folder}`"
    from vitpar.data.sources.arrays import DIGITS, DIGITS_PACKAGE, INSTALL_DIGITS

    if folder.name != DIGITS:  # the folder of the shipped recipe
        packing = f"SOURCE {folder}`"
        if folder.is_dir() and any(folder.iterdir()):
            packing = f"{folder} data_shards/{folder.name}` and give data_shards/{folder.name}"
        return f"make one with `vitpar data pack {packing}, or index existing shards with `vitpar data index {folder}`"
    first = "" if find_spec(DIGITS_PACKAGE) else f", after {INSTALL_DIGITS}"
    return f"make it with `vitpar data pack {DIGITS} {folder}`{first}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `dataset.json` atomically. Call this last, after the shards and indexes are written."""
    write_text(folder / MANIFEST, json.dumps(manifest.model_dump(exclude_none=True), indent=1) + "\n")


def write_split(
    folder: Path, split: str, shards: Sequence[Path], tables: Sequence[np.ndarray], classes: int
) -> SplitEntry:
    """Write the index of a split and return its entry for the manifest.

    shards: paths of the shards.
    tables: index rows of each shard, ROW [samples]; the values of column `shard` are ignored.
    classes: number of classes.
    """
    rows = np.concatenate([np.empty(0, ROW), *tables])
    rows["shard"] = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    partial = folder / f".{split}.index.partial"
    with partial.open("w+b") as file:
        np.save(file, rows)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    partial.replace(folder / f"{split}.index.npy")
    per_class = np.bincount(rows["label"], minlength=classes).tolist()
    entries = [
        ShardEntry(file=path.name, samples=len(table), bytes=path.stat().st_size)
        for path, table in zip(shards, tables, strict=True)
    ]
    return SplitEntry(shards=entries, samples=len(rows), per_class=per_class, index_sha256=digest)


def read_rows(folder: Path | ObjectPath, split: str, entry: SplitEntry) -> np.ndarray:
    """Read the index of a split, ROW [samples].

    Not a mapping of the file: if that is cut while it is used, the kernel ends the process.

    Raises DataError if its checksum is not that in the manifest, or if it does not fit the shards.
    """
    path, again = folder / f"{split}.index.npy", f"rewrite it with `vitpar data index {folder}`"
    try:
        data = read_bytes(path)
    except OSError as error:
        raise DataError(f"index '{path}' cannot be read ({error.strerror}): {again}") from None
    if hashlib.sha256(data).hexdigest() != entry.index_sha256:
        raise DataError(f"index '{path}' is not the one recorded in {MANIFEST}: {again}")
    header = 10 + int.from_bytes(data[8:10], "little")  # of the format npy 1.0
    if len(data) == header + entry.samples * ROW.itemsize:
        rows, samples = np.frombuffer(data, ROW, offset=header), [shard.samples for shard in entry.shards]
        numbers = np.arange(len(samples))
        if sum(samples) == len(rows) and np.array_equal(rows["shard"], np.repeat(numbers, samples)):
            sizes = np.repeat(np.array([shard.bytes for shard in entry.shards], np.int64), samples)
            first = 0 if entry.shards and entry.shards[0].file.endswith(TOKENS) else tarfile.BLOCKSIZE
            inside = (rows["offset"] >= first) & (rows["offset"] <= sizes - rows["size"]) & (rows["size"] > 0)
            known = (rows["label"] >= 0) & (rows["label"] < len(entry.per_class))
            if (inside & known).all():
                return rows
    raise DataError(f"index '{path}' does not match the shards in {MANIFEST}: {again}")
