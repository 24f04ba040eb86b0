"""Random access to the sequences of a split of text."""

from __future__ import annotations

import itertools
import zlib
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitpar.data.images import BadImage
from vitpar.data.shards.manifest import Manifest, Specials, SplitEntry, TextSection
from vitpar.data.shards.shard_set import DAMAGED, ShardSet
from vitpar.data.text.tokenizer import Tokenizer, load_tokenizer
from vitpar.errors import DataError
from vitpar.object_store import ObjectPath

_GAP = 4096  # bytes between two sequences that are read and dropped, since another read takes longer
_SPAN = 1 << 20  # most bytes of one read


class TextSet(ShardSet):
    """Split of packed text, opened for reading sequences by number from any thread.

    text: section of the manifest: tokenizer and counts.
    tokens: largest number of ids in a sequence.
    vocab_size: number of tokens in the vocabulary.
    specials: special tokens.
    lengths: number of ids in each sequence, int64 [sequences].

    It is pickled as its folder and split, and opened again.
    """

    def __init__(self, folder: Path | ObjectPath, split: str, manifest: Manifest, rows: np.ndarray) -> None:
        assert manifest.text is not None, "TextSet.open has checked it"
        super().__init__(folder, split, manifest, rows)
        self.text: TextSection = manifest.text
        self.tokens, self.vocab_size = self.text.tokens, self.text.vocab_size
        self.specials: Specials = self.text.specials
        self.lengths, rest = np.divmod(self._size.astype(np.int64), self.text.stored.itemsize)
        if not ((rest == 0) & (self.lengths > 0) & (self.lengths <= self.tokens)).all():
            raise DataError(
                f"the index of '{split}' in '{folder}' has sequences of other sizes than 1 to {self.tokens} ids: pack "
                "the text again"
            )

    @classmethod
    def _refuse_kind(cls, folder: Path | ObjectPath, manifest: Manifest, entry: SplitEntry) -> None:
        if manifest.text is None:
            raise DataError(
                f"'{folder}' holds images, but text is needed: pack text with `vitpar data pack SRC DST --tokens N`"
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that the text was packed with. Raises DataError if its file is missing or was changed."""
        name = self.text.tokenizer_file
        return load_tokenizer(None if name is None else self.folder / name, self.text.tokenizer_sha256)

    @property
    def documents(self) -> int:
        """Number of documents in the split."""
        return self.text.documents.get(self.split, 0)

    def ids(self, i: int) -> NDArray[np.int64]:
        """Return the ids of sequence `i`, int64 [length].

        Raises DataError as `read` does, and for ids outside the vocabulary.
        """
        ids = np.frombuffer(self.read(i), self.text.stored).astype(np.int64)
        self._refuse_unknown(ids)
        return ids

    def name(self, i: int) -> str:
        return f"{self.files[self._shard[i]].name}/sequence {i}"

    def decode(self, i: int) -> str:
        """Return the text of sequence `i`. Raises DataError as `ids` does."""
        return self.tokenizer.decode(self.ids(i).tolist())

    def read_batch(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of several sequences, padded, int64 [n, tokens], and their lengths, int64 [n].

        Sequences that are stored near each other are read together.

        samples: numbers of the sequences, int64 [n].

        Raises DataError as `ids` does, with the name of the sequence.
        """
        stored = np.lexsort((self._offset[samples], self._shard[samples]))
        ordered = samples[stored]
        lengths = self.lengths[ordered]
        parts: list[memoryview] = []
        columns = (self._offset, self._size, self._crc)
        for start, stop in self._spans(ordered) if len(ordered) else ():
            near = ordered[start:stop]
            begins, sizes, crcs = (column[near].tolist() for column in columns)
            first, end = begins[0], max(begin + size for begin, size in zip(begins, sizes, strict=True))
            data = memoryview(self._read_range(int(self._shard[near[0]]), first, end - first))
            for sample, begin, size, crc in zip(near.tolist(), begins, sizes, crcs, strict=True):
                parts.append(data[begin - first : begin - first + size])
                if zlib.crc32(parts[-1]) != crc:
                    raise DataError(self.complaint(sample, BadImage(DAMAGED)))
        flat = np.frombuffer(b"".join(parts), self.text.stored)
        try:
            self._refuse_unknown(flat)
        except BadImage as error:
            owners = np.repeat(ordered, lengths)
            raise DataError(self.complaint(int(owners[flat.argmax()]), error)) from None
        ids = np.full((len(samples), self.tokens), self.specials.padding, np.int64)
        ids[np.arange(self.tokens) < lengths[:, None]] = flat
        back = np.argsort(stored)
        return ids[back], lengths[back]

    def _spans(self, samples: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return which of `samples`, in stored order, to read together: pairs of begin and end."""
        shard, begin = self._shard[samples], self._offset[samples]
        far = (shard[1:] != shard[:-1]) | (begin[1:] - begin[:-1] - self._size[samples[:-1]] > _GAP)
        # Cut where the distance from the first sample of all passes a multiple of the largest read.
        far |= begin[1:] // _SPAN != begin[:-1] // _SPAN
        cuts = [0, *(np.flatnonzero(far) + 1).tolist(), len(samples)]
        return [*itertools.pairwise(cuts)]

    def _refuse_unknown(self, ids: np.ndarray) -> None:
        if ids.max(initial=0) >= self.vocab_size:
            raise BadImage(f"it has an id outside its vocabulary of {self.vocab_size:,}: pack the text again")
