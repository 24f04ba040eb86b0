"""Targets of attacks: a target makes seeds, makes cases of them, and reads a case as vitpar's users would.

Case N of a target is the same bytes every time: a generator seeded with its name and N draws everything for it. Of the
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
"""By path in the folder of the case."""
Attack = Callable[[random.Random, Files], str]
"""Changes the files of a seed, and says in a few words how."""
SMALL, FORMED = 0.45, 0.85
"""Cases below the first are small edits of a seed; below the second, attacks that know the format; the rest both, and
rough edits."""
SEED_EVERY = 3
STRAYED = 0.02
"""The part of cases in which a file becomes something that is no regular file."""


class Refused(UserError):
    """Refusal that a reader returned instead of raising."""


@dataclass
class Case:
    """A case as it lies in the folder `place`. changed: which files are not those of the seed. how: it was made."""

    number: int
    place: Path
    seed: int
    files: Files = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    how: str = "the seed itself"
    told: Any = None

    @property
    def untouched(self) -> bool:
        """Whether it is a seed as it is."""
        return not self.changed and self.told is None

    @property
    def bytes(self) -> int:
        """Bytes that were written, to tell short cases from long ones."""
        return sum(len(content) if isinstance(content, bytes) else 1 for content in self.files.values())


class Target(ABC):
    """One kind of input. home: a folder for what making the seeds takes."""

    what: ClassVar[str]
    """Is attacked, in a few words."""
    programs: ClassVar[tuple[str, ...]] = ()
    """Programs that reading may start."""

    @abstractmethod
    def __init__(self, home: Path) -> None:
        """Make the seeds."""

    @abstractmethod
    def make(self, draw: random.Random, number: int, place: Path) -> Case:
        """Make case `number` in the empty folder `place`."""

    @abstractmethod
    def read(self, case: Case) -> None:
        """Read it as vitpar does. Raises what the reader raises (UserError where it refuses), Refused, and
        `oracle.Wrong` for what was accepted and should not have been."""

    def close(self) -> None:  # noqa: B027, most have nothing of the kind
        """Release what outlives a case."""

    def case(self, name: str, number: int, place: Path) -> Case:
        """Case `number` of the target that is called `name`, in the empty folder `place`."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return self.make(random.Random(f"{name} {number}"), number, place)


class FileTarget(Target):
    """A target whose seeds are folders of small files, and whose cases are such folders with some files changed.

    seeds: the folders. attacks: those that know the format, drawn alike; one that is there twice is drawn twice as
    often. edits: which files small edits change (None: all). tokens: what text is made of.
    """

    seeds: list[dict[str, bytes]]
    attacks: tuple[Attack, ...] = ()
    tokens: tuple[bytes, ...] = ()
    strays: ClassVar[bool] = True

    def editable(self, files: Files) -> list[str]:
        """The files that are edited byte by byte."""
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
    """Which of the seeds case `number` is, None for one that is made of a seed."""
    return number // SEED_EVERY if number % SEED_EVERY == 0 and number < SEED_EVERY * seeds else None


def tolerated(call: Callable[[], Any]) -> Any:
    """Return what `call` returns, None where it refuses: for work that follows from something accepted, and may itself
    be refused.

    Raises `oracle.Worse` for a refusal that breaks a promise to users.
    """
    try:
        return call()
    except UserError as error:
        if findings := oracle.of_error(error):
            raise oracle.Worse(findings) from None
        return None


def read_folder(folder: Path) -> dict[str, bytes]:
    """All files in a folder, by their path in it."""
    return {
        os.path.relpath(os.path.join(parent, name), folder): Path(parent, name).read_bytes()
        for parent, _, names in sorted(os.walk(folder))
        for name in sorted(names)
    }


def found(name: str) -> type[Target]:
    """The target that is called `name` in `fuzzing.targets.TARGETS`, or that `module:class` names."""
    from fuzzing.targets import TARGETS

    module, _, kind = TARGETS.get(name, name).partition(":")
    loaded: type[Target] = getattr(importlib.import_module(module), kind)
    return loaded


def names() -> Iterator[str]:
    """Yield the names of all targets."""
    from fuzzing.targets import TARGETS

    yield from TARGETS
