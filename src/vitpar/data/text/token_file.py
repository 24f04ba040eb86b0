"""Ids of all documents of a split in one file, while a data set is packed."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from vitpar.data.sources.source import Progress
from vitpar.data.text.sources import TextSource
from vitpar.data.text.tokenizer import Tokenizer
from vitpar.io import write_text

_CHARACTERS, _TEXTS = 1 << 22, 1 << 13  # limits of what is tokenised at a time, which all cores share
_END = np.dtype("<i8")


class TokenFile:
    """Files `SPLIT.ids` and `SPLIT.ends`: ids of all documents, and the place where each document ends.

    `SPLIT.progress` notes how far they are complete, so that an interrupted run continues there.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype) -> None:
        self.split, self._dtype = split, dtype
        self._ids, self._ends, self._progress = (folder / f"{split}.{name}" for name in ("ids", "ends", "progress"))

    def read(self) -> tuple[np.ndarray, NDArray[np.int64]]:
        """Return the ids, mapped from the file, and the ends of documents that have ids, int64 [documents]."""
        ends = np.fromfile(self._ends, _END).astype(np.int64)
        ids = np.memmap(self._ids, self._dtype, "r").view(np.ndarray) if len(ends) else np.empty(0, self._dtype)
        return ids, ends

    def fill(
        self, source: TextSource, tokenizer: Tokenizer, separator: int | None, progress: Progress | None = None
    ) -> None:
        """Tokenise the documents that are not in the files yet.

        separator: token after each document; None for none.
        progress: called with kilobytes of the source.

        Raises DataError for a source that cannot be read.
        """
        state = {"seen": 0, "documents": 0, "ids": 0, "complete": False}
        with suppress(OSError, ValueError):
            state = json.loads(self._progress.read_text())
        if state["complete"]:
            return
        total, work = source.bytes(self.split), f"{self.split}: kB of text"
        skip, seen, size, open_ids = state["seen"], 0, state["ids"], 0
        texts: list[str] = []
        last: list[bool] = []
        characters = kept = 0

        def flush(read: int, complete: bool = False) -> None:
            nonlocal size, open_ids, characters, kept
            ids, lengths = tokenizer.encode(texts) if texts else (np.empty(0, np.int64), np.empty(0, np.int64))
            stops = np.cumsum(lengths)[np.array(last, bool)]
            filled = np.diff(stops, prepend=-open_ids) > 0
            open_ids = open_ids + len(ids) if not len(stops) else len(ids) - int(stops[-1])
            stops = stops[filled]
            if separator is not None:
                ids = np.insert(ids, stops, separator)
                stops = stops + np.arange(1, len(stops) + 1)
            ids.astype(self._dtype).tofile(ids_file)
            (size + stops).astype(_END).tofile(ends_file)
            size, kept = size + len(ids), kept + len(stops)
            if not open_ids:  # otherwise a continued run repeats the document
                ids_file.flush()
                ends_file.flush()
                state.update(seen=seen, documents=kept, ids=size, complete=complete)
                write_text(self._progress, json.dumps(state))
            texts.clear()
            last.clear()
            characters = 0
            if progress:
                progress(work, -(-min(read, total) // 1000), -(-total // 1000))

        with (
            self._continued(self._ids, size * self._dtype.itemsize) as ids_file,
            self._continued(self._ends, state["documents"] * _END.itemsize) as ends_file,
        ):
            kept = state["documents"]
            for piece in source.pieces(self.split):
                known, seen = seen < skip, seen + piece.last
                if known:
                    continue
                texts.append(piece.text)
                last.append(piece.last)
                characters += len(piece.text)
                if characters >= _CHARACTERS or len(texts) >= _TEXTS:
                    flush(piece.read)
            flush(total, complete=True)

    @staticmethod
    def _continued(path: Path, size: int) -> BinaryIO:
        """Open a file for appending, cut to `size` bytes."""
        file = path.open("ab")
        file.truncate(size)
        return file
