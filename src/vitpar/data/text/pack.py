"""Packing of text into token files: tokenise all documents, cut them into sequences, shuffle those, and write them."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import SampleOrder, shuffled
from vitpar.data.shards.destination import LEFTOVERS, check_destination, put_in_place, stamps, workplace
from vitpar.data.shards.manifest import ROW, TOKENS, Manifest, SplitEntry, write_manifest, write_split
from vitpar.data.sources.source import Progress
from vitpar.data.text.section import TextSection
from vitpar.data.text.sources import Documents, TextSource, open_text
from vitpar.data.text.token_file import TokenFile
from vitpar.data.text.tokenizer import BYTES, Tokenizer, open_tokenizer
from vitpar.errors import DataError
from vitpar.limits import MAX_TOKENS

VAL_FRACTION = 0.05
"""Default fraction of the documents that becomes `val` if a source of text has no such split."""
SHARD_SEQUENCES = 50_000
"""Default number of sequences in a shard."""
FEW_DOCUMENTS = 20
"""Number of documents below which the last sequences become `val` instead of complete documents."""
TOKENIZER_FILE = "tokenizer.json"
"""Name of the tokenizer's file in a data set."""


@dataclass(frozen=True)
class Sequences:
    """Sequences of a split, as places in the joined text of some documents."""

    begins: NDArray[np.int64]
    """Begin and end of runs of neighbouring documents in the token file, int64 [runs]."""
    ends: NDArray[np.int64]
    """End of each run, int64 [runs]."""
    starts: NDArray[np.int64]
    """Place of each sequence's first id in the joined runs, int64 [sequences]."""
    stops: NDArray[np.int64]
    """Place after its last id, int64 [sequences]."""
    documents: int
    """Number of documents that the sequences are from."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def ids(self) -> int:
        """Number of ids in all sequences."""
        return int((self.stops - self.starts).sum())

    def part(self, chosen: slice, documents: int) -> Sequences:
        """Return some of the sequences."""
        return Sequences(self.begins, self.ends, self.starts[chosen], self.stops[chosen], documents)

    def reader(self, ids: np.ndarray) -> Callable[[int], np.ndarray]:
        """Return a function from the number of a sequence to its ids.

        ids: content of the token file.
        """
        joined = np.cumsum(self.ends - self.begins)

        def read(i: int) -> np.ndarray:
            place, stop, parts = int(self.starts[i]), int(self.stops[i]), []
            run = int(np.searchsorted(joined, place, side="right"))
            while place < stop:
                end = int(self.ends[run]) - int(joined[run]) + stop
                begin = int(self.ends[run]) - int(joined[run]) + place
                parts.append(ids[begin : min(end, int(self.ends[run]))])
                place += len(parts[-1])
                run += 1
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        return read


def cut(ends: NDArray[np.int64], chosen: NDArray[np.int64] | None, tokens: int, separated: bool) -> Sequences:
    """Cut documents into sequences of at most `tokens` ids.

    ends: end of each document in the token file, int64 [documents].
    chosen: numbers of the documents to cut, ascending; None for all.
    separated: whether sequences continue over the ends of documents, each of which ends with a separator. The one at
        the very end is left out.
    """
    begins = np.concatenate([[0], ends[:-1]])
    if chosen is not None:
        begins, ends = begins[chosen], ends[chosen]
    lengths = ends - begins
    joined = np.cumsum(lengths)
    if separated:
        total = int(lengths.sum()) - 1
        starts = np.arange(0, total, tokens)
        stops = np.minimum(starts + tokens, total)
    else:
        counts = -(-lengths // tokens)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(joined - lengths, counts) + within * tokens
        stops = np.minimum(starts + tokens, np.repeat(joined, counts))
    new = np.flatnonzero(np.concatenate([[True], begins[1:] != ends[:-1]]))
    return Sequences(begins[new], ends[np.append(new[1:], len(ends)) - 1], starts, stops, len(lengths))


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
    opened: Callable[[TextSource, Tokenizer], None] = lambda source, tokenizer: None,
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
    if not 1 <= tokens <= MAX_TOKENS:
        raise DataError(f"sequences of {tokens:,} tokens are out of range: choose from 1 to {MAX_TOKENS:,}")
    if shard_samples < 1:
        raise DataError(f"shard size {shard_samples} is not a positive number of samples")
    target = Path(destination).resolve()
    check_destination(target, overwrite)
    text, words = open_all(source, tokenizer, documents, field, cross_documents, val_fraction)
    opened(text, words)
    files = [stamps(path)[0] for paths in text.files.values() for path in paths]
    content = None if words.file is None else hashlib.sha256(words.file).hexdigest()
    cuts = (tokens, content, text.documents, text.field, cross_documents, val_fraction, shard_samples, seed)
    digest = hashlib.sha256(json.dumps(["text", 2, cuts, files]).encode()).hexdigest()
    try:
        with workplace(target, digest, keep=(f"*{TOKENS}", "*.progress")) as folder:
            packing = _Packing(text, words, folder, tokens, cross_documents, shard_samples, seed, progress)
            manifest = packing.run(VAL_FRACTION if val_fraction is None else val_fraction)
            check_destination(target, overwrite)  # again, since packing may have taken hours
            put_in_place(folder, target, (*LEFTOVERS, "*.ids", "*.ends", "*.progress"))
    except OSError as error:
        raise DataError(
            f"cannot write '{destination}': {error.strerror or error}; rerun the command to resume"
        ) from error
    return manifest


def open_all(
    source: str | Path,
    tokenizer: str = BYTES,
    documents: Documents | None = None,
    field: str | None = None,
    cross_documents: bool = False,
    val_fraction: float | None = None,
) -> tuple[TextSource, Tokenizer]:
    """Open source and tokenizer, with the arguments of `pack_text`. Raises DataError."""
    if val_fraction is not None and not 0 <= val_fraction < 1:
        raise DataError(f"val fraction {val_fraction} is out of range: choose a number from 0 (no val) to below 1")
    text = open_text(source, documents, field)
    if "val" in text.files and val_fraction is not None:
        raise DataError(f"'{source}' already has a val split: remove the val fraction {val_fraction}")
    words = open_tokenizer(tokenizer)
    if cross_documents and words.specials.end is None:
        raise DataError(f"--cross-documents needs a token eos or sep, which '{tokenizer}' lacks: leave it out")
    return text, words


@dataclass
class _Packing:
    """Writer of those shards of a source of text that a folder does not have yet."""

    source: TextSource
    """Opened source."""
    tokenizer: Tokenizer
    """Opened tokenizer."""
    folder: Path
    """Hidden folder that becomes the destination."""
    tokens: int
    """Largest number of ids in a sequence."""
    cross_documents: bool
    """Whether sequences continue over the ends of documents."""
    shard_samples: int
    """Sequences in a shard."""
    seed: int
    """Seed of the choice of `val` and of the shuffle."""
    progress: Progress | None
    """Called as documents are tokenised and sequences written; None for no calls."""

    def run(self, val_fraction: float) -> Manifest:
        dtype = np.dtype("<u2" if self.tokenizer.vocab_size <= 1 << 16 else "<u4")
        ids: dict[str, np.ndarray] = {}
        sequences: dict[str, Sequences] = {}
        separator = self.tokenizer.specials.end if self.cross_documents else None
        for split in self.source.files:
            file = TokenFile(self.folder, split, dtype)
            file.fill(self.source, self.tokenizer, separator, self.progress)
            ids[split], ends = file.read()
            if not len(ends):
                raise DataError(f"'{self.source.location}' has no text for the split '{split}': add some")
            if split == "train" and "val" not in self.source.files and val_fraction > 0:
                sequences |= self._carved(ends, val_fraction)
                ids["val"] = ids[split]
            else:
                sequences[split] = cut(ends, None, self.tokens, self.cross_documents)
        entries = {split: self._split(split, sequences[split], ids[split]) for split in sequences}
        name = None if self.tokenizer.file is None else TOKENIZER_FILE
        if name and self.tokenizer.file is not None:
            (self.folder / name).write_bytes(self.tokenizer.file)
        section = TextSection(
            tokens=self.tokens,
            vocab_size=self.tokenizer.vocab_size,
            dtype="uint16" if dtype.itemsize == 2 else "uint32",
            tokenizer="bytes" if self.tokenizer.file is None else "file",
            tokenizer_file=name,
            tokenizer_sha256=self.tokenizer.file and hashlib.sha256(self.tokenizer.file).hexdigest(),
            specials=self.tokenizer.specials,
            cross_documents=self.cross_documents,
            documents={split: one.documents for split, one in sequences.items()},
            ids={split: one.ids for split, one in sequences.items()},
        )
        manifest = Manifest(classes=[], labels="none", splits=entries, text=section)
        write_manifest(self.folder, manifest)
        return manifest

    def _carved(self, ends: NDArray[np.int64], fraction: float) -> dict[str, Sequences]:
        """Return the sequences of `train` and `val`, from documents of a source without `val`.

        Raises DataError for too little text.
        """
        count = len(ends)
        if count >= FEW_DOCUMENTS:
            is_val = np.zeros(count, bool)
            is_val[shuffled(np.arange(math.ceil(fraction * count - 1e-9)), count, self.seed)] = True
            chosen = {"train": np.flatnonzero(~is_val), "val": np.flatnonzero(is_val)}
            if len(chosen["train"]):
                return {split: cut(ends, part, self.tokens, self.cross_documents) for split, part in chosen.items()}
        sequences = cut(ends, None, self.tokens, self.cross_documents)
        first = len(sequences) - math.ceil(fraction * len(sequences) - 1e-9)
        if first < 1:
            raise DataError(
                f"'{self.source.location}' makes too few sequences of {self.tokens} tokens ({len(sequences)}) for a "
                "val split: add text, use shorter sequences or --val-fraction 0"
            )
        documents = np.cumsum(ends - np.concatenate([[0], ends[:-1]]))
        last = int(np.searchsorted(documents, sequences.stops[first - 1], side="left")) + 1
        from_ = int(np.searchsorted(documents, sequences.starts[first], side="right"))
        return {
            "train": sequences.part(slice(first), last),
            "val": sequences.part(slice(first, None), count - from_),
        }

    def _split(self, name: str, sequences: Sequences, ids: np.ndarray) -> SplitEntry:
        size = len(sequences)
        order = np.arange(size)
        if name == "train":
            order = SampleOrder(self.seed, size).samples(0, order)
        paths, tables = [], []
        read = sequences.reader(ids)
        for number, first in enumerate(range(0, size, self.shard_samples)):
            stop = min(first + self.shard_samples, size)
            paths.append(self.folder / f"{name}-{number:06d}{TOKENS}")
            rows = paths[-1].with_suffix(".rows")
            # A shard that exists is complete, since it is renamed last.
            if not (paths[-1].exists() and rows.exists()):
                partial = paths[-1].with_suffix(".partial")
                _write(partial, (read(int(order[place])).tobytes() for place in range(first, stop))).tofile(rows)
                partial.replace(paths[-1])
            tables.append(np.fromfile(rows, ROW))
            assert len(tables[-1]) == stop - first, f"{paths[-1]} has {len(tables[-1])} sequences"
            if self.progress:
                self.progress(name, stop, size)
        return write_split(self.folder, name, paths, tables, 0)


def _write(path: Path, sequences: Iterable[bytes]) -> np.ndarray:
    """Write the ids of sequences one after another, and return their index rows, ROW [sequences]."""
    sizes, checksums = [], []
    with path.open("wb") as file:
        for ids in sequences:
            file.write(ids)
            sizes.append(len(ids))
            checksums.append(zlib.crc32(ids))
    rows = np.zeros(len(sizes), ROW)
    rows["size"], rows["crc"] = sizes, checksums
    rows["offset"][1:] = np.cumsum(sizes)[:-1]
    return rows
