"""Files of a git work tree as it is now: tracked ones, and others that git does not ignore."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path


def names(root: Path) -> list[str]:
    """Return the paths of the files relative to `root`. Raises OSError or CalledProcessError without a work tree."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name]


def copy(root: Path, target: Path) -> None:
    """Copy the files to the folder `target`. Links stay links. Raises as `names`."""
    for name in names(root):
        with suppress(FileNotFoundError):  # deleted, but not in the index yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name, follow_symlinks=False)
