"""Ids of all documents of a split in one file, while a data set is packed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitpar.data.sources.source import Progress
from vitpar.data.text.sources import Piece, TextSource
from vitpar.data.text.tokenizer import Tokenizer

_CHARACTERS, _TEXTS = 1 << 22, 1 << 13  # limits of what is tokenised at a time, which all cores share
_END = np.dtype("<i8")


def tokenised(
    folder: Path,
    source: TextSource,
    split: str,
    tokenizer: Tokenizer,
    dtype: np.dtype,
    separator: int | None,
    progress: Progress | None,
) -> tuple[np.ndarray, NDArray[np.int64]]:
    """Return the ids of a split, mapped from `SPLIT.ids`, and the ends of documents that have ids, int64 [documents].

    An interrupted run continues after the last document whose end is in `SPLIT.ends`.

    separator: token after each document; None for none.
    progress: called with kilobytes of the source.

    Raises DataError for a source that cannot be read.
    """
    complete, partial, ends_path = (folder / f"{split}.{name}" for name in ("ids", "partial-ids", "ends"))
    if not complete.exists():
        total = source.bytes(split)
        with partial.open("ab") as ids_file, ends_path.open("ab") as ends_file:
            ends = np.fromfile(ends_path, _END)
            ends = ends[ends * dtype.itemsize <= ids_file.tell()]
            begin = size = int(ends[-1]) if len(ends) else 0  # of the document that comes next, and of the file
            ids_file.truncate(size * dtype.itemsize)
            ends_file.truncate(ends.nbytes)
            for pieces in _batches(source.pieces(split), len(ends)):
                ids, lengths = tokenizer.encode([piece.text for piece in pieces])
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
