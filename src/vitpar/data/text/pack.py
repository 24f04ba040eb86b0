"""Packing of text into token files: tokenise all documents, cut them into sequences, shuffle those, and write them."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import SampleOrder, shuffled
from vitpar.data.shards.manifest import ROW, TOKENS, Manifest, SplitEntry, TextSection, write_manifest, write_split
from vitpar.data.shards.pack import check_destination, packing_into, stamps
from vitpar.data.sources.source import Progress
from vitpar.data.text.sources import Documents, Piece, TextSource, open_text
from vitpar.data.text.tokenizer import BYTES, Tokenizer, open_tokenizer
from vitpar.errors import DataError
from vitpar.limits import MAX_TOKENS
from vitpar.text import count, shown

VAL_FRACTION = 0.05
"""Default fraction of the documents that becomes `val` if a source of text has no such split."""
SHARD_SEQUENCES = 50_000
"""Default number of sequences in a shard."""
FEW_DOCUMENTS = 20
"""Number of documents below which the last sequences become `val` instead of complete documents."""
TOKENIZER_FILE = "tokenizer.json"
"""Name of the tokenizer's file in a data set."""
_CHARACTERS, _TEXTS = 1 << 22, 1 << 13  # limits of what is tokenised at a time, which all cores share
_END = np.dtype("<i8")


@dataclass(frozen=True)
class Sequences:
    """Sequences of a split, as places in the joined text of some documents."""

    ends: NDArray[np.int64]
    """End of each document in the token file, int64 [documents]."""
    joined: NDArray[np.int64]
    """End of each document in the joined text, int64 [documents]."""
    starts: NDArray[np.int64]
    """Place of each sequence's first id in the joined text, int64 [sequences]."""
    stops: NDArray[np.int64]
    """Place after its last id, int64 [sequences]."""
    documents: int
    """Number of documents that the sequences are from."""

    def read(self, ids: np.ndarray, i: int) -> bytes:
        """Return the bytes of sequence `i`. ids: content of the token file."""
        place, stop, parts = int(self.starts[i]), int(self.stops[i]), list[np.ndarray]()
        document = int(np.searchsorted(self.joined, place, side="right"))
        while place < stop:
            until = min(stop, int(self.joined[document]))
            moved = int(self.ends[document]) - int(self.joined[document])
            parts.append(ids[moved + place : moved + until])
            place, document = until, document + 1
        return np.concatenate(parts).tobytes()


@dataclass(frozen=True)
class TextPacking:
    """Opened source and tokenizer, and how the text is packed."""

    source: TextSource
    """Files of text."""
    tokenizer: Tokenizer
    """Opened tokenizer."""
    name: str
    """Name of the tokenizer, as given."""
    tokens: int
    """Largest number of ids in a sequence."""
    cross_documents: bool
    """Whether sequences continue over the ends of documents."""
    val_fraction: float
    """Fraction of the documents, or of the sequences, that becomes `val` if the source has no such split."""

    def describe(self) -> list[str]:
        """Return lines on what was found, and what becomes of it."""
        lines = self.source.describe()
        if "val" not in self.source.files:
            part = f"{self.val_fraction:.0%} of train's documents".replace("%", " %", 1)
            part += ", or the last of its sequences if there are few documents"
            lines.append(f"  val: {part}" if self.val_fraction else "  no val split: runs do not evaluate")
        vocabulary = count(self.tokenizer.vocab_size, "token")
        return [*lines, f"  tokenizer {shown(self.name)}: {vocabulary}, sequences of at most {self.tokens:,}"]

    def write(self, folder: Path, shard_samples: int, seed: int, progress: Progress | None) -> Manifest:
        """Write those parts of the data set that a folder does not have yet, and return the manifest."""
        file, specials = self.tokenizer.file, self.tokenizer.specials
        dtype = np.dtype("<u2" if self.tokenizer.vocab_size <= 1 << 16 else "<u4")
        ids: dict[str, np.ndarray] = {}
        sequences: dict[str, Sequences] = {}
        for split in self.source.files:
            ids[split], ends = self._tokenised(folder, split, dtype, progress)
            if not len(ends):
                raise DataError(f"'{self.source.location}' has no text for the split '{split}': add some")
            if split == "train" and "val" not in self.source.files and self.val_fraction > 0:
                sequences |= self._carved(ends, seed)
                ids["val"] = ids[split]
            else:
                sequences[split] = self._cut(ends, np.arange(len(ends)))
        entries = {}
        for split, one in sequences.items():
            order = np.arange(len(one.starts))
            if split == "train":
                order = SampleOrder(seed, len(order)).samples(0, order)
            entries[split] = _write(folder, split, one, ids[split], order, shard_samples, progress)
        if file is not None:
            (folder / TOKENIZER_FILE).write_bytes(file)
        section = TextSection(
            tokens=self.tokens,
            vocab_size=self.tokenizer.vocab_size,
            dtype="uint16" if dtype.itemsize == 2 else "uint32",
            tokenizer="bytes" if file is None else "file",
            tokenizer_file=None if file is None else TOKENIZER_FILE,
            tokenizer_sha256=None if file is None else hashlib.sha256(file).hexdigest(),
            specials=specials,
            cross_documents=self.cross_documents,
            documents={split: one.documents for split, one in sequences.items()},
            ids={split: int((one.stops - one.starts).sum()) for split, one in sequences.items()},
        )
        manifest = Manifest(classes=[], labels="none", splits=entries, text=section)
        write_manifest(folder, manifest)
        return manifest

    def _tokenised(
        self, folder: Path, split: str, dtype: np.dtype, progress: Progress | None
    ) -> tuple[np.ndarray, NDArray[np.int64]]:
        """Return the ids of a split, mapped from `SPLIT.ids`, and the ends of documents with ids, int64 [documents].

        An interrupted run continues after the last document whose end is in `SPLIT.ends`.

        progress: called with kilobytes of the source.

        Raises DataError for a source that cannot be read.
        """
        separator = self.tokenizer.specials.end if self.cross_documents else None  # after each document
        complete, partial, ends_path = (folder / f"{split}.{name}" for name in ("ids", "partial-ids", "ends"))
        if not complete.exists():
            total = self.source.bytes(split)
            with partial.open("ab") as ids_file, ends_path.open("ab") as ends_file:
                ends = np.fromfile(ends_path, _END)
                ends = ends[ends * dtype.itemsize <= ids_file.tell()]
                begin = size = int(ends[-1]) if len(ends) else 0  # of the document that comes next, and of the file
                ids_file.truncate(size * dtype.itemsize)
                ends_file.truncate(ends.nbytes)
                for pieces in _batches(self.source.pieces(split), len(ends)):
                    ids, lengths = self.tokenizer.encode([piece.text for piece in pieces])
                    stops = np.cumsum(lengths)[[piece.last for piece in pieces]]
                    if separator is not None:
                        filled = np.diff(size + stops, prepend=begin) > 0
                        ids = np.insert(ids, stops[filled], separator)
                        stops = stops + np.cumsum(filled)
                    ids.astype(dtype).tofile(ids_file)
                    (size + stops).astype(_END).tofile(ends_file)
                    begin = size + int(stops[-1]) if len(stops) else begin
                    size += len(ids)
                    if progress:
                        progress(f"{split}: kB of text", -(-min(pieces[-1].read, total) // 1000), -(-total // 1000))
            partial.replace(complete)
        ends = np.fromfile(ends_path, _END).astype(np.int64)
        ends = ends[np.diff(ends, prepend=0) > 0]
        return np.memmap(complete, dtype, "r").view(np.ndarray) if len(ends) else np.empty(0, dtype), ends

    def _cut(self, ends: NDArray[np.int64], chosen: NDArray[np.int64]) -> Sequences:
        """Cut documents into sequences.

        Those over the ends of documents, each of which ends with a separator, leave out the one at the very end.

        ends: end of each document in the token file, int64 [documents].
        chosen: numbers of the documents to cut, ascending.
        """
        lengths, ends = np.diff(ends, prepend=0)[chosen], ends[chosen]
        joined = np.cumsum(lengths)
        if self.cross_documents:
            total = int(lengths.sum()) - 1
            starts = np.arange(0, total, self.tokens)
            stops = np.minimum(starts + self.tokens, total)
        else:
            counts = -(-lengths // self.tokens)
            within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            starts = np.repeat(joined - lengths, counts) + within * self.tokens
            stops = np.minimum(starts + self.tokens, np.repeat(joined, counts))
        return Sequences(ends, joined, starts, stops, len(lengths))

    def _carved(self, ends: NDArray[np.int64], seed: int) -> dict[str, Sequences]:
        """Return the sequences of `train` and `val`, from documents of a source without `val`.

        Raises DataError for too little text.
        """
        fraction, everything = self.val_fraction, np.arange(len(ends))
        if len(ends) >= FEW_DOCUMENTS:
            val = np.sort(shuffled(np.arange(math.ceil(fraction * len(ends) - 1e-9)), len(ends), seed))
            if len(val) < len(ends):
                return {"train": self._cut(ends, np.setdiff1d(everything, val)), "val": self._cut(ends, val)}
        sequences = self._cut(ends, everything)
        number = len(sequences.starts)
        first = number - math.ceil(fraction * number - 1e-9)
        if first < 1:
            raise DataError(
                f"'{self.source.location}' makes too few sequences of {self.tokens} tokens ({number}) for a "
                "val split: add text, use shorter sequences or --val-fraction 0"
            )
        last = int(np.searchsorted(ends, sequences.stops[first - 1], side="left")) + 1
        from_ = int(np.searchsorted(ends, sequences.starts[first], side="right"))
        starts, stops = sequences.starts, sequences.stops
        return {
            "train": replace(sequences, starts=starts[:first], stops=stops[:first], documents=last),
            "val": replace(sequences, starts=starts[first:], stops=stops[first:], documents=len(ends) - from_),
        }


def _batches(pieces: Iterable[Piece], skipped: int) -> Iterator[list[Piece]]:
    """Yield the pieces that are tokenised at a time. skipped: documents to leave out first."""
    batch, characters, seen = list[Piece](), 0, 0
    for piece in pieces:
        known, seen = seen < skipped, seen + piece.last
        if known:
            continue
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _CHARACTERS or len(batch) >= _TEXTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write(
    folder: Path,
    split: str,
    sequences: Sequences,
    ids: np.ndarray,
    order: NDArray[np.int64],
    shard_samples: int,
    progress: Progress | None,
) -> SplitEntry:
    """Write the shards of a split, with the sequences in `order`, and its index."""
    paths, tables = [], []
    for number, first in enumerate(range(0, len(order), shard_samples)):
        chosen = order[first : first + shard_samples]
        paths.append(folder / f"{split}-{number:06d}{TOKENS}")
        rows_path, partial = paths[-1].with_suffix(".rows"), paths[-1].with_suffix(".partial")
        # A shard that exists is complete, since it is renamed last.
        if not (paths[-1].exists() and rows_path.exists()):
            rows = np.zeros(len(chosen), ROW)
            with partial.open("wb") as file:
                for row, i in enumerate(chosen.tolist()):
                    data = sequences.read(ids, i)
                    rows[row] = 0, 0, file.tell(), len(data), zlib.crc32(data)
                    file.write(data)
            rows.tofile(rows_path)
            partial.replace(paths[-1])
        tables.append(np.fromfile(rows_path, ROW))
        if progress:
            progress(split, first + len(chosen), len(order))
    return write_split(folder, split, paths, tables, 0)


def open_all(
    source: str | Path,
    tokens: int,
    tokenizer: str = BYTES,
    documents: Documents | None = None,
    field: str | None = None,
    cross_documents: bool = False,
    val_fraction: float | None = None,
) -> TextPacking:
    """Open source and tokenizer, with the arguments of `pack_text`. Raises DataError."""
    if not 1 <= tokens <= MAX_TOKENS:
        raise DataError(f"sequences of {tokens:,} tokens are out of range: choose from 1 to {MAX_TOKENS:,}")
    if val_fraction is not None and not 0 <= val_fraction < 1:
        raise DataError(f"val fraction {val_fraction} is out of range: choose a number from 0 (no val) to below 1")
    text = open_text(source, documents, field)
    if "val" in text.files and val_fraction is not None:
        raise DataError(f"'{source}' already has a val split: remove the val fraction {val_fraction}")
    words = open_tokenizer(tokenizer)
    if cross_documents and words.specials.end is None:
        raise DataError(f"--cross-documents needs a token eos or sep, which '{tokenizer}' lacks: leave it out")
    fraction = VAL_FRACTION if val_fraction is None else val_fraction
    return TextPacking(text, words, tokenizer, tokens, cross_documents, fraction)


def pack_text(
    source: str | Path,
    destination: str | Path,
    tokens: int,
    *,
    tokenizer: str = BYTES,
    documents: Documents | None = None,
    field: str | None = None,
    cross_documents: bool = False,
    val_fraction: float | None = None,
    shard_samples: int = SHARD_SEQUENCES,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
    opened: Callable[[TextPacking], None] = lambda packing: None,
) -> Manifest:
    """Pack text into the folder `destination` and return the manifest. The same input gives the same bytes.

    As with images, the folder is complete when it appears, and an interrupted run continues when it is repeated with
    the same arguments. Memory grows with the number of documents and sequences, by some tens of bytes each, not with
    the size of the text.

    source: a .txt, .jsonl or .parquet file, or a folder of these.
    tokens: largest number of ids in a sequence.
    tokenizer: `bytes`, or path of a tokenizer.json.
    documents: content of a document of a .txt file; `file` if None.
    field: field or column with the text in JSON lines and Parquet files; `text` if None.
    cross_documents: whether sequences continue over the ends of documents, with a token `eos` or `sep` between.
    val_fraction: fraction of the documents that becomes `val` if the source has no such split, or of the sequences if
        there are fewer than FEW_DOCUMENTS; VAL_FRACTION if None; 0 for no `val` split.
    shard_samples: sequences in a shard.
    seed: seed of the choice of `val` and of the shuffle of the training sequences.
    overwrite: whether to replace an existing data set.
    progress: called as documents are tokenised and sequences written.
    opened: called with the opened source and tokenizer before anything is written.

    Raises DataError for a source or tokenizer that cannot be read, and as `vitpar.data.shards.pack.pack` does.
    """
    if shard_samples < 1:
        raise DataError(f"shard size {shard_samples} is not a positive number of samples")
    check_destination(destination, overwrite)
    packing = open_all(source, tokens, tokenizer, documents, field, cross_documents, val_fraction)
    opened(packing)
    text, file = packing.source, packing.tokenizer.file
    files = [stamps(path)[0] for paths in text.files.values() for path in paths]
    settings = [tokens, text.documents, text.field, cross_documents, val_fraction, shard_samples, seed]
    digest = hashlib.sha256((file or b"") + json.dumps(["text", 3, settings, files]).encode()).hexdigest()
    with packing_into(destination, overwrite, digest) as folder:
        return packing.write(folder, shard_samples, seed, progress)
