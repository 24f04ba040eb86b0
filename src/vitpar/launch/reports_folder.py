"""The temporary folder of one launcher and its ranks, and what launchers that were killed have left of theirs.

A launcher holds a lock on a file in its folder for as long as it lives, so a folder whose lock can be taken is left.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# With the name of the machine: where several share the folder, a lock may hold on its own machine alone.
PREFIX = f"vitpar-ranks-{re.sub('[^A-Za-z0-9]', '-', platform.node())[:32]}-"
_LOCK = "lock"


@contextmanager
def reports_folder() -> Iterator[Path]:
    """Make an empty folder that only this user can enter, and remove it in the end. First removes those left behind."""
    remove_left()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with open(folder / f".{_LOCK}", "xb") as file:
            with suppress(OSError):  # where a file system has no locks, folders that are left stay
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Only now under the name that others look for: they never see it without its lock.
                os.rename(folder / f".{_LOCK}", folder / _LOCK)
            yield folder


def remove_left() -> None:
    """Remove this user's folders in the temporary folder whose launchers are gone. Follows no link, raises nothing."""
    with suppress(OSError):
        for entry in os.scandir(tempfile.gettempdir()):
            if entry.name.startswith(PREFIX):
                with suppress(OSError):
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    found = entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where its launcher lives
        shutil.rmtree(entry.path)
    finally:
        os.close(lock)
