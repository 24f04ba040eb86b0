"""Replacements of a file: FIFOs, folders, links, and huge sparse files."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["fifo", "folder", "link to zeros", "link to itself", "dangling link", "sparse"]
KINDS: tuple[Kind, ...] = ("fifo", "folder", "link to zeros", "link to itself", "dangling link", "sparse")
SPARSE_BYTES = 2 << 30


@dataclass(frozen=True)
class Odd:
    """Replacement of a file."""

    kind: Kind
    begin: bytes = b""
    """First bytes of a sparse file."""


def stray(draw: random.Random, files: dict[str, bytes | Odd]) -> str:
    """Replace one of `files`; return a description."""
    name = draw.choice(sorted(files))
    kind, content = draw.choice(KINDS), files[name]
    files[name] = Odd(kind, content if isinstance(content, bytes) else b"")
    return f"{name}: {kind}"


def write(folder: Path, files: Mapping[str, bytes | Odd]) -> None:
    """Write the files of a case."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            _write_odd(path, content)


def _write_odd(path: Path, odd: Odd) -> None:
    match odd.kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link to zeros":
            path.symlink_to("/dev/zero")
        case "link to itself":
            path.symlink_to(path.name)
        case "dangling link":
            path.symlink_to("nowhere")
        case "sparse":
            path.write_bytes(odd.begin)
            os.truncate(path, SPARSE_BYTES)
