"""Base classes of targets: a target makes seeds, mutates them into cases, and reads a case as a user of vitpar would.

Case N of a target has the same bytes every time: its random generator is seeded with the target's name and N. Of the
first cases every third is an unchanged seed, which a reader must accept.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fuzzing import oracle
from fuzzing.attacks import odd
from fuzzing.attacks.binary import rough, small
from fuzzing.attacks.odd import Odd
from vitpar.errors import UserError

Content = bytes | Odd
Files = dict[str, Content]
"""Contents by path in the folder of the case."""
Attack = Callable[[random.Random, Files], str]
"""Function that changes the files of a seed and returns a short description."""
SMALL, FORMED = 0.45, 0.85
"""Limits of a uniform random number that selects the kind of mutation: small edits below SMALL, attacks that know the
format below FORMED, and both above."""
SEED_EVERY = 3
"""One in this many of the first cases is an unchanged seed."""
STRAYED = 0.02
"""Share of the cases in which a file is replaced by something that is not a regular file."""


class Refused(UserError):
    """Refusal that a reader returned instead of raising it."""


@dataclass
class Case:
    """A case, written to a folder."""

    number: int
    place: Path
    """Folder of the case."""
    seed: int
    """Index of the seed it was made from."""
    files: Files = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    """Names of the files that differ from the seed."""
    how: str = "the seed itself"
    """Description of the mutation."""
    told: Any = None
    """Input that is not in a file, for example a text."""

    @property
    def untouched(self) -> bool:
        """Return whether the case is an unchanged seed."""
        return not self.changed and self.told is None

    @property
    def bytes(self) -> int:
        """Size of the case in bytes."""
        return sum(len(content) if isinstance(content, bytes) else 1 for content in self.files.values())


class Target(ABC):
    """One kind of input.

    home: folder for files that are needed to make the seeds.
    """

    what: ClassVar[str]
    """Short description of the input."""
    programs: ClassVar[tuple[str, ...]] = ()
    """Programs that the reader may start."""

    @abstractmethod
    def __init__(self, home: Path) -> None:
        """Make the seeds."""

    @abstractmethod
    def make(self, draw: random.Random, number: int, place: Path) -> Case:
        """Make case `number` in the empty folder `place`."""

    @abstractmethod
    def read(self, case: Case) -> None:
        """Read the case as vitpar does.

        Raises the errors of the reader (UserError for a refusal), Refused, and `oracle.Wrong` if the reader accepted a
        wrong input.
        """

    def close(self) -> None:  # noqa: B027, most have nothing of the kind
        """Release resources that outlive a case."""

    def case(self, name: str, number: int, place: Path) -> Case:
        """Make case `number` of the target named `name` in the folder `place`, which is emptied first."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return self.make(random.Random(f"{name} {number}"), number, place)


class FileTarget(Target):
    """A target whose seeds are folders of small files, and whose cases are such folders with some files changed."""

    seeds: list[dict[str, bytes]]
    """Contents by path, for each folder."""
    attacks: tuple[Attack, ...] = ()
    """Attacks that know the format. One that is listed twice is drawn twice as often."""
    tokens: tuple[bytes, ...] = ()
    """Tokens of the format, which edits insert."""
    strays: ClassVar[bool] = True
    """Whether a file may be replaced by something that is not a regular file."""

    def editable(self, files: Files) -> list[str]:
        """Return the names of the files that byte edits may change."""
        return sorted(name for name, content in files.items() if isinstance(content, bytes))

    def make(self, draw: random.Random, number: int, place: Path) -> Case:
        whole = whole_seed(number, len(self.seeds))
        seed = draw.randrange(len(self.seeds)) if whole is None else whole
        files: Files = dict(self.seeds[seed])
        how = self._attacked(draw, files) if whole is None else "the seed itself"
        before = self.seeds[seed]
        changed = frozenset(name for name in {*before, *files} if before.get(name) != files.get(name))
        odd.write(place, files)
        return Case(number, place, seed, files, changed, f"seed {seed}: {how}")

    def _attacked(self, draw: random.Random, files: Files) -> str:
        kind, said = draw.random(), []
        if draw.random() < STRAYED and self.strays:
            return odd.stray(draw, files)
        if kind >= SMALL and self.attacks:
            said.append(draw.choice(self.attacks)(draw, files))
        if kind < SMALL or kind >= FORMED or not self.attacks:
            names = self.editable(files)
            if names:
                name = draw.choice(names)
                content = files[name]
                assert isinstance(content, bytes)
                edit = small if kind < FORMED or draw.random() < 0.5 else rough
                others = [other for other in files.values() if isinstance(other, bytes)]
                files[name], words = edit(draw, content, others, self.tokens)
                said.append(f"{name}: {words}")
        return "; ".join(said) or "nothing to change"


def whole_seed(number: int, seeds: int) -> int | None:
    """Return the index of the seed that case `number` is, None if the case is a mutation."""
    return number // SEED_EVERY if number % SEED_EVERY == 0 and number < SEED_EVERY * seeds else None


def tolerated(call: Callable[[], Any]) -> Any:
    """Return the result of `call`, or None if it raises UserError.

    For uses of an accepted input that may be refused themselves. Raises `oracle.Worse` if the refusal breaks a
    guarantee.
    """
    try:
        return call()
    except UserError as error:
        if findings := oracle.of_error(error):
            raise oracle.Worse(findings) from None
        return None


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder by relative path."""
    return {
        os.path.relpath(os.path.join(parent, name), folder): Path(parent, name).read_bytes()
        for parent, _, names in sorted(os.walk(folder))
        for name in sorted(names)
    }


def found(name: str) -> type[Target]:
    """Return the class of the target `name` in `fuzzing.targets.TARGETS`, or of `module:class`."""
    from fuzzing.targets import TARGETS

    module, _, kind = TARGETS.get(name, name).partition(":")
    loaded: type[Target] = getattr(importlib.import_module(module), kind)
    return loaded


def names() -> Iterator[str]:
    """Yield the names of all targets."""
    from fuzzing.targets import TARGETS

    yield from TARGETS
