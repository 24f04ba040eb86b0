"""Folder that a data set is packed into: written under a hidden name next to it, and renamed when complete."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from vitpar.data.shards.manifest import MANIFEST, read_any_manifest
from vitpar.errors import DataError

LEFTOVERS = ("lock", "*.rows", "*.skipped", "*.ids", "*.partial-ids", "*.ends")
"""Patterns of files of a packing run that are not part of the data set."""
_KEPT = ("*.tar", "*.tokens", "*.ids", "*.partial-ids")  # files that another run continues with


def check_destination(destination: str | Path, overwrite: bool) -> None:
    """Raise DataError unless a data set may be packed into `destination`.

    overwrite: whether to replace an existing data set.
    """
    target = Path(destination).resolve()
    if target.exists() and not target.is_dir():
        raise DataError(f"'{target}' is a file: choose a folder to pack into")
    if os.path.ismount(target):
        raise DataError(f"'{target}' is a mount point and cannot be replaced: choose a folder inside it")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not (target / MANIFEST).exists():
        raise DataError(f"'{target}' is not empty and not a data set: choose another folder")
    if not overwrite:
        raise DataError(f"'{target}' is an existing data set: choose another folder, or replace it with --overwrite")
    if "vitpar_dataset" not in read_any_manifest(target):
        raise DataError(f"'{target / MANIFEST}' was not written by vitpar: choose another folder")


def stamps(source: Path) -> list[tuple[str, int, int]]:
    """Return the files of a source with sizes in bytes and modification times in ns.

    They identify the source and reveal changes to it.
    """
    paths = [source, *(sorted(source.iterdir()) if source.is_dir() else ())]
    return [(str(path.resolve()), (s := path.stat()).st_size, s.st_mtime_ns) for path in paths if path.is_file()] + [
        (str(source.resolve()), 0, 0)
    ]


@contextmanager
def packing_into(destination: str | Path, overwrite: bool, digest: str) -> Iterator[Path]:
    """Lock a hidden folder next to `destination`, yield its path, and rename it to `destination` at the end.

    It contains the files of an interrupted run if that had the same `digest`, and is emptied otherwise. If the run
    fails, it stays if another run can continue with its files.

    overwrite: whether to replace an existing data set.
    digest: checksum of the source and the settings.

    Raises DataError if another process holds the lock, or the folder cannot be written.
    """
    target = Path(destination).resolve()
    partial = target.with_name(f".{target.name}.packing")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with (partial / "lock").open("a+") as lock:
            _lock(lock, target)
            lock.seek(0)
            if lock.read() != digest:
                for path in partial.iterdir():
                    if path.name != "lock":
                        path.unlink()
                lock.truncate(0)
                lock.write(digest)
                lock.flush()
            try:
                yield partial
                check_destination(target, overwrite)  # again, since packing may have taken hours
                old = None
                if target.exists() and any(target.iterdir()):
                    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
                    target.rename(old)
                partial.replace(target)
                for path in [path for pattern in LEFTOVERS for path in target.glob(pattern)]:
                    path.unlink()
                if old is not None:
                    shutil.rmtree(old)
            finally:
                if not any(path.stat().st_size for pattern in _KEPT for path in partial.glob(pattern)):
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write '{destination}': {error.strerror or error}; rerun the command to resume"
        ) from error


def _lock(file: TextIO, target: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"another process is packing into '{target}': wait for it, or stop it") from None
    except OSError:  # the file system has no locks
        pass
