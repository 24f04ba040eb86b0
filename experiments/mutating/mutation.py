"""Mutations: wrong changes of the source, and the commands that must notice them."""

from __future__ import annotations

import compileall
import py_compile
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import work_tree


class MutationError(Exception):
    """A mutation does not fit the source any more."""


@dataclass(frozen=True)
class Mutation:
    """One wrong change of the source."""

    name: str
    """Unique; for --only and the table."""
    breaks: str
    """Defect of the changed source, in one sentence."""
    file: str
    """Path within the repository."""
    old: str
    """Exact text that occurs once in the file."""
    new: str
    """Replacement of `old`."""
    caught_by: str
    """Command that must notice it: `vitpar check …` or `pytest NODE …`, quoted as for a shell."""

    def applied(self, text: str) -> str:
        """Return the text of the file with the change. Raises MutationError unless `old` occurs exactly once."""
        if (found := text.count(self.old)) != 1:
            raise MutationError(
                f"the old text of mutation {self.name} occurs {found} times in {self.file}: adapt it to the source"
            )
        return text.replace(self.old, self.new)


@contextmanager
def mutated(root: Path, mutation: Mutation) -> Iterator[None]:
    """Context manager that applies the mutation to the copy of the repository in `root`."""
    path = root / mutation.file
    text = path.read_text()
    path.write_text(mutation.applied(text))
    try:
        yield
    finally:
        path.write_text(text)


def copy_tree(source: Path, target: Path) -> Path:
    """Copy a git work tree to `target`: its current files, except those that git ignores. Raises MutationError.

    Bytecode is validated by a hash of the source. By time and size, Python could miss a change in the same second.
    """
    try:
        work_tree.copy(source, target)
    except (OSError, subprocess.CalledProcessError):
        raise MutationError(f"git cannot list the files of '{source}': run this in a clone of the repository") from None
    for part in ("src", "cli"):
        compileall.compile_dir(target / part, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return target


def problem(root: Path, mutation: Mutation) -> str | None:
    """Return why a mutation cannot be applied to the repository in `root`, or None."""
    try:
        changed = mutation.applied((root / mutation.file).read_text())
        if mutation.file.endswith(".py"):
            compile(changed, mutation.file, "exec")
    except FileNotFoundError:
        return f"mutation {mutation.name} changes {mutation.file}, which does not exist: adapt it to the source"
    except MutationError as error:
        return str(error)
    except SyntaxError as error:
        return f"{mutation.file} with mutation {mutation.name} is not Python: {error}"
    if not mutation.caught_by.startswith(("vitpar check ", "pytest ")):
        return f"mutation {mutation.name} names no command: begin caught_by with vitpar check or pytest"
    return f"mutation {mutation.name} changes nothing: give another new text" if mutation.new == mutation.old else None
