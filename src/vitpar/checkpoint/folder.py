"""A run's checkpoints: which there are, which are whole, which are kept.

checkpoints/step_300/       whole: it got its name when all of it was written
checkpoints/step_350.partial, step_250.removed       left by a run that was killed; nobody reads them
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitpar.checkpoint.storage import INDEX, Index, damage, read_index, remove
from vitpar.errors import CheckpointError

STATE = "state.json"
_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint. facts: the numbers and words of its state, as the run gave them."""

    path: Path
    index: Index
    facts: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Raises CheckpointError where `path` is none."""
        index = read_index(path)
        try:
            facts = json.loads((path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{STATE} of '{path}' cannot be read: {error}") from None
        if not isinstance(facts, dict):
            raise CheckpointError(f"{STATE} of '{path}' is no object: use another checkpoint")
        return cls(path, index, facts)

    @property
    def step(self) -> int:
        """Updates that were made before it."""
        return int(self.facts["step"])

    def damage(self, part: int = 0, parts: int = 1) -> str | None:
        """What is wrong with its files, None if nothing is; of `parts` that look at some of them each, for `part`."""
        names = sorted(self.index.files)[part::parts]
        return damage(self.path, {name: self.index.files[name] for name in names})


class Checkpoints:
    """The checkpoints in one folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Where the one of `step` is."""
        return self.folder / f"step_{step}"

    def steps(self) -> list[int]:
        """Those that are there, oldest first."""
        names = (_NAME.fullmatch(path.name) for path in self.folder.glob("step_*"))
        return sorted(int(name[1]) for name in names if name and (self.folder / name[0] / INDEX).exists())

    def clear(self) -> None:
        """Remove what killed runs left."""
        for path in [*self.folder.glob("step_*.partial"), *self.folder.glob("step_*.removed")]:
            shutil.rmtree(path, ignore_errors=True)

    def keep(self, steps: Iterable[int]) -> None:
        """Remove all but these."""
        for step in set(self.steps()) - set(steps):
            remove(self.path(step))
