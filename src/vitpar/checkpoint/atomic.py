"""Atomic files and folders: complete or absent, even if the machine stops at any moment.

step_300.partial     while it is written          step_300.removed     while it is removed
"""

import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path

from vitpar.checkpoint.index import StoredFile

_CHUNK = 1 << 24
"""Bytes that are written at a time."""


def partial(folder: Path) -> Path:
    """Return the path of `folder` while it is written."""
    return folder.with_name(folder.name + ".partial")


def removed(folder: Path) -> Path:
    """Return the path of `folder` while it is removed."""
    return folder.with_name(folder.name + ".removed")


def begin(folder: Path) -> None:
    """Create the empty folder in which `folder` is written, replacing one left by an earlier attempt."""
    shutil.rmtree(partial(folder), ignore_errors=True)
    partial(folder).mkdir(parents=True)


def write(path: Path, content: bytes | memoryview) -> StoredFile:
    """Write a new file and wait until it is on disk.

    The file must not exist: a rank of an earlier attempt may still be writing. Releases the interpreter lock while it
    writes.
    """
    content, crc = memoryview(content), 0
    with path.open("xb", buffering=0) as file:
        for start in range(0, len(content), _CHUNK):
            chunk = content[start : start + _CHUNK]
            crc = zlib.crc32(chunk, crc)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return StoredFile(bytes=len(content), crc32=crc)


def publish(folder: Path) -> None:
    """Rename the partial folder to `folder`, replacing a folder of that name."""
    _sync(partial(folder))
    gone, replaces = removed(folder), folder.exists()
    shutil.rmtree(gone, ignore_errors=True)
    if replaces:
        os.replace(folder, gone)
    try:
        os.replace(partial(folder), folder)
    except OSError:
        if replaces:
            os.replace(gone, folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a folder atomically: it never looks complete while parts of it are gone."""
    gone = removed(folder)
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file that other code wrote is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    with suppress(OSError):  # some mounts do not support it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
