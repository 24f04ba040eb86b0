"""Cases, and base class of targets: readers of vitpar that take untrusted input."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import strategies as st

from fuzzing.edits import Draw, edited, pick

Files = dict[str, bytes]
"""Contents by path in the folder of the case."""
ODD = "fifo", "folder", "sparse", "/dev/zero", "itself", "nowhere"
"""Replacements of a file: one of the first three, or the target of a link."""
SPARSE_BYTES = 2 << 30


@dataclass(frozen=True, repr=False)
class Case:
    """Input of a target."""

    files: Files
    seed: int = 0
    """Index of the seed that it was made from."""
    argument: Any = None
    """Input that is not in a file, for example a text; None for the usual one."""
    changed: frozenset[str] = frozenset()
    """Names of the files that differ from the seed."""
    sealed: bool = False
    """Whether checksums were recomputed, so that the reader cannot know that the content changed."""
    is_seed: bool = False
    """Whether a reader must accept it."""
    odd: tuple[str, str] | None = None
    """Name of a file that is replaced by something else, and what that is (`ODD`)."""

    def __repr__(self) -> str:
        changed = f"changes {', '.join(sorted(self.changed))} of " if self.changed else ""
        sealed = ", with right checksums" * self.sealed
        return f"{changed}seed {self.seed}{sealed} {self.odd or self.argument or ''!r:.300}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print all fields, which may have megabytes

    def write(self, folder: Path) -> None:
        """Write the files into a folder."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            match self.odd and self.odd[0] == name and self.odd[1]:
                case "fifo":
                    os.mkfifo(path)
                case "folder":
                    path.mkdir()
                case str(target) if target != "sparse":
                    path.symlink_to(path.name if target == "itself" else target)
                case odd:
                    path.write_bytes(content)
                    os.truncate(path, SPARSE_BYTES if odd else len(content))


class Target(ABC):
    """One kind of input, described by the first line of the docstring.

    home: folder for files that are needed to make the seeds.
    """

    programs: ClassVar[tuple[str, ...]] = ()
    """Programs that the reader may start."""
    seeds: Sequence[Files] = ()
    """Folders of small valid files."""
    argument: st.SearchStrategy[Any] = st.none()
    """Input that is not in a file."""
    pieces: Sequence[bytes] = ()
    """Complete hostile contents of a file."""
    triggers: Sequence[Case] = ()
    """Cases that once showed a defect, or that chance would hardly find. They run first, after the seeds."""

    def __init__(self, home: Path) -> None:
        self.make(home)

    @abstractmethod
    def make(self, home: Path) -> None:
        """Set seeds, pieces and triggers."""

    @abstractmethod
    def read(self, case: Case, place: Path) -> None:
        """Read the case, whose files are in the folder `place`, as vitpar does.

        Raises the errors of the reader (UserError for a refusal), and `oracle.Wrong` if it accepted a wrong input.
        """

    def prepare(self, case: Case) -> None:  # noqa: B027, most have only files
        """Prepare what a case needs outside its process."""

    def seal(self, files: Files) -> bool:
        """Correct checksums that one file has of another; return whether that was possible."""
        return False

    def editable(self, files: Files) -> list[str]:
        """Return the names of the files to edit."""
        return sorted(files)

    def case(self, seed: int, changes: Files, **settings: Any) -> Case:
        """Return the case of a seed with other contents of some files."""
        before, files = self.seeds[seed], {**self.seeds[seed], **changes}
        odd = settings.get("odd") or ("",)
        changed = frozenset(name for name in files if before.get(name) != files[name] or name == odd[0])
        return Case(files, seed, changed=changed, **settings)

    def first(self) -> list[Case]:
        """Return the unchanged seeds and the triggers."""
        return [*(Case(files, number, is_seed=True) for number, files in enumerate(self.seeds)), *self.triggers]

    def drawn(self, draw: Draw) -> Case:
        """Return a case with one or two edited files."""
        seed = draw(st.integers(0, len(self.seeds) - 1))
        files, sealed, odd = dict(self.seeds[seed]), False, None
        names = self.editable(files)
        for _ in range(draw(st.integers(1, 2))):
            name, way = draw(st.sampled_from(names)), draw(st.integers(0, 19))
            if way == 19:
                odd = name, draw(st.sampled_from(ODD))
            elif way == 18:
                files[name] = files[draw(st.sampled_from(names))]
            elif way >= 15 and self.pieces:
                files[name] = pick(draw, self.pieces)
            else:
                files[name], known = edited(draw, files[name])
                sealed |= known
        if draw(st.booleans()):
            sealed |= self.seal(files)
        return self.case(seed, files, argument=draw(self.argument), sealed=sealed, odd=odd)


def read_folder(folder: Path) -> Files:
    """Return the contents of all files in a folder by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
