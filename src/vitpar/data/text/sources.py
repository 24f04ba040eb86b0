"""Sources of text: .txt files, JSON lines and Parquet files, read document by document.

Documents are read in pieces of about a megabyte, so a file of any size may be one document. A piece ends with a line
or before a space, which leaves the words of most tokenizers as they are.
"""

from __future__ import annotations

import gzip
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from vitpar.data.sources.source import SPLITS, by_split, parquet_library, using
from vitpar.errors import DataError
from vitpar.io import decode_utf8, open_regular, parse_json
from vitpar.text import count, either, shown
from vitpar.text import size as shown_size

Documents = Literal["file", "paragraph", "line"]
"""Content of a document of a .txt file: the complete file, what blank lines surround, or a line."""

_PIECE = 1 << 20  # characters
_ROWS = 64  # rows of a Parquet file that are read at a time
_KINDS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_HINT = "use .txt, .jsonl (also .gz) or .parquet files, or a folder of one of these"


@dataclass(frozen=True)
class Piece:
    """Document, or a part of a long one."""

    text: str
    """Text of the piece."""
    last: bool
    """Whether the document ends with it."""
    read: int
    """Bytes of the split's files that were read so far, for progress."""


@dataclass(frozen=True)
class TextSource:
    """Files of text by split."""

    location: str
    """Path as given, for messages."""
    files: Mapping[str, tuple[Path, ...]]
    """Files of each split, in order."""
    documents: Documents = "file"
    """Content of a document of a .txt file."""
    field: str = "text"
    """Field or column with the text in JSON lines and Parquet files."""

    def bytes(self, split: str) -> int:
        """Return the size of a split's files."""
        return sum(path.stat().st_size for path in self.files[split])

    def pieces(self, split: str) -> Iterator[Piece]:
        """Yield the documents of a split in order, each in one or more pieces. White space alone counts as empty.

        Raises DataError.
        """
        before, blank, held = 0, True, list[Piece]()  # white space that a document begins with
        for path in self.files[split]:
            if (kind := kind_of(path)) == "txt":
                found = _text(path, self.documents)
            else:
                found = (_jsonl if kind == "jsonl" else _parquet)(path, self.field)
            for piece in found:
                held.append(replace(piece, read=before + piece.read))
                blank = blank and (not piece.text or piece.text.isspace())
                if piece.last or not blank:
                    yield from [replace(held[-1], text="")] if blank else held
                    held, blank = [], piece.last
            before += path.stat().st_size

    def describe(self) -> list[str]:
        """Return lines on what was found."""
        lines = [f"{shown(self.location)}: text"]
        for split, paths in self.files.items():
            lines.append(f"  {split}: {count(len(paths), 'file')}, {shown_size(self.bytes(split))}")
        return lines


def kind_of(path: Path) -> str | None:
    """Return `txt`, `jsonl` or `parquet` by the name of a file; None for another."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    kind = _KINDS.get(plain.suffix.lower())
    return None if kind == "parquet" and plain is not path else kind


def open_text(location: str | Path, documents: Documents | None = None, field: str | None = None) -> TextSource:
    """Find the text at `location`, a file or a folder of files of one kind.

    The splits are those in the names of files, or else of their folders; all files are `train` without.

    documents: content of a document of a .txt file; `file` if None.
    field: field or column with the text in JSON lines and Parquet files; `text` if None.

    Raises DataError, also for an option that the kind of files does not have.
    """
    path = Path(location)
    if path.is_file():
        files: dict[str, list[Path]] = {"train": [path]}
        if kind_of(path) is None:
            raise DataError(f"'{shown(location)}' is no text: {_HINT}")
    elif path.is_dir():
        found = [file for depth in ("*", "*/*") for file in path.glob(depth) if not file.name.startswith(".")]
        files = by_split((file for file in found if kind_of(file) and file.is_file()), path)
    else:
        raise DataError(f"no folder or file '{shown(location)}' to pack: {_HINT}")
    kinds = sorted({kind_of(file) or "" for paths in files.values() for file in paths})
    if len(kinds) != 1:
        what = f"{either(kinds).replace(' or ', ' and ')} files" if kinds else "no text"
        raise DataError(f"'{shown(location)}' has {what}: {_HINT}")
    if "train" not in files:
        raise DataError(f"'{location}' has {', '.join(files)} but no training split: add files named train")
    if documents is not None and kinds != ["txt"]:
        raise DataError(f"--documents {documents} is for .txt files, but '{location}' has {kinds[0]}: leave it out")
    if field is not None and kinds == ["txt"]:
        raise DataError(f"--field {shown(field)} is for JSON lines and Parquet, but '{location}' has txt: leave it out")
    splits = {split: tuple(files[split]) for split in SPLITS if split in files}
    return TextSource(str(location), splits, documents or "file", field or "text")


@contextmanager
def _readable(path: Path) -> Iterator[tuple[BinaryIO, Any]]:
    """Open a file, which may be compressed by gzip. Yield the file as stored, and its content.

    Raises DataError in place of an error of reading within the context.
    """
    with using(f"cannot read '{path}'"), open_regular(path, pages=path.suffix == ".txt") as stored:
        try:
            yield stored, gzip.GzipFile(fileobj=stored) if path.suffix == ".gz" else stored
        except ValueError as error:
            raise DataError(f"cannot read '{path}': {error}") from None


def _text(path: Path, documents: Documents) -> Iterator[Piece]:
    with _readable(path) as (stored, content):
        if b"\0" in content.peek(256)[:256]:
            raise ValueError("line 1 has NUL characters, as UTF-16 has: save it as UTF-8")
        # It is kept, since it closes `stored` when it is gone. Ends of lines are kept as they are.
        file = io.TextIOWrapper(content, encoding="utf-8-sig", newline="\n")
        for text, last in _DOCUMENTS[documents](_lines(file)):
            yield Piece(text, last, stored.tell())


def _lines(file: io.TextIOBase) -> Iterator[str]:
    """Yield the lines of a file with their ends; long ones in parts that end before a space if there is one."""
    rest, number = "", 1
    try:
        while part := file.readline(_PIECE):
            number += part.endswith("\n")
            part = rest + part
            cut = len(part) if part.endswith("\n") or len(part) < _PIECE else max(part.rfind(" "), 0) or len(part)
            rest = part[cut:]
            yield part[:cut]
    except UnicodeDecodeError as error:  # of a block of the file, whose first line is not complete yet
        decode_utf8(error.object, number)
    if rest:
        yield rest


def _complete(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield one document in pieces, and whether each is the last."""
    held: list[str] = []
    size = 0
    for line in lines:
        if size and size + len(line) > _PIECE:
            yield "".join(held), False
            held, size = [], 0
        held.append(line)
        size += len(line)
    yield "".join(held), True


def _paragraphs(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    for blank, group in itertools.groupby(lines, key=str.isspace):
        if not blank:
            for text, last in _complete(group):
                yield text.removesuffix("\n").removesuffix("\r") if last else text, last


def _each_line(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    last = True
    for line in lines:
        last = line.endswith("\n")
        yield line.removesuffix("\n").removesuffix("\r"), last
    if not last:
        yield "", True


_DOCUMENTS = {"file": _complete, "paragraph": _paragraphs, "line": _each_line}


def _cut(text: str, read: int) -> Iterator[Piece]:
    """Yield the document `text`, in pieces if it is long."""
    found = _complete(_lines(io.StringIO(text))) if len(text) > _PIECE else [(text, True)]
    for piece, last in found:
        yield Piece(piece, last, read)


def _jsonl(path: Path, field: str) -> Iterator[Piece]:
    with _readable(path) as (stored, content):
        for number, line in enumerate(content, start=1):
            if line.isspace():
                continue
            where, text = f"line {number} of '{path}'", decode_utf8(line, number)
            try:
                record = parse_json(text)
            except ValueError as error:
                raise DataError(f"{where} is not a JSON object ({shown(error)}): correct it") from None
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                names = shown(", ".join(map(str, record)) if isinstance(record, dict) else "no fields")
                raise DataError(f"{where} has no text in a field '{shown(field)}' ({names}): name another with --field")
            yield from _cut(record[field], stored.tell())


def _parquet(path: Path, field: str) -> Iterator[Piece]:
    library = parquet_library()
    with _readable(path) as (stored, _):
        size, done = stored.seek(0, io.SEEK_END), 0
    with using(f"'{path}' cannot be read as Parquet"), library.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if field not in names or str(file.schema_arrow.field(field).type) not in ("string", "large_string"):
            raise DataError(
                f"'{path}' has no column '{shown(field)}' of text ({shown(', '.join(names))}): name another with "
                "--field"
            )
        for batch in file.iter_batches(_ROWS, columns=[field]):
            for text in batch.column(0).to_pylist():
                done += 1
                yield from _cut(text or "", size * done // max(1, file.metadata.num_rows))
