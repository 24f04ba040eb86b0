"""Run every command on the clean source, then every mutation with its commands, several at a time."""

from __future__ import annotations

import compileall
import py_compile
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

from mutating.command import Commands, Outcome
from mutating.mutation import Mutation, MutationError, mutated

Told = Callable[[int, int, str, "Outcome | Result"], None]
"""Progress callback: number done, total, name of a command or mutation, its outcome."""


@dataclass(frozen=True)
class Result:
    """Outcome of one mutation."""

    mutation: Mutation
    tried: tuple[tuple[str, Outcome], ...]
    """Commands that ran and their outcomes, up to the first that caught the mutation."""

    @property
    def caught(self) -> tuple[str, Outcome] | None:
        """Command that caught the mutation and its outcome, None if it was missed."""
        kinds = ("failed", "crash") if self.mutation.crash_counts else ("failed",)
        return next((pair for pair in self.tried if pair[1].kind in kinds), None)

    @property
    def seconds(self) -> float:
        """Wall time of all commands that ran."""
        return sum(outcome.seconds for _, outcome in self.tried)


@dataclass(frozen=True)
class Campaign:
    """Outcomes of all mutations."""

    clean: dict[str, Outcome]
    """Outcome of each command on the unchanged source."""
    results: tuple[Result, ...]

    @property
    def all_caught(self) -> bool:
        """Return whether every command passes on the unchanged source and every mutation was caught."""
        return all(o.kind == "passed" for o in self.clean.values()) and all(r.caught for r in self.results)


def run(source: Path, mutations: Sequence[Mutation], *, parallel: int, limit: float, progress: Told) -> Campaign:
    """Try `mutations` on copies of the git work tree `source`, `parallel` at a time.

    limit: seconds for one command
    progress: called after each command and mutation

    Raises MutationError if `source` is not a git work tree. On Ctrl-C, raises KeyboardInterrupt after all processes
    have ended and the copies are deleted.
    """
    runner = Commands(limit)
    with _copies(source, parallel) as copies, ThreadPoolExecutor(parallel) as pool:

        def in_a_copy(job: Callable[[Path], Any]) -> Any:
            root = copies.get()
            try:
                return job(root)
            finally:
                copies.put(root)

        try:
            commands = list(dict.fromkeys(command for mutation in mutations for command in mutation.caught_by))
            waiting = {pool.submit(in_a_copy, partial(runner.run, command)): command for command in commands}
            clean: dict[str, Outcome] = {}
            for number, future in enumerate(as_completed(waiting), start=1):
                clean[waiting[future]] = future.result()
                progress(number, len(waiting), waiting[future], future.result())
            trying = [pool.submit(in_a_copy, partial(_try, runner, clean, mutation)) for mutation in mutations]
            for number, tried in enumerate(as_completed(trying), start=1):
                progress(number, len(trying), tried.result().mutation.name, tried.result())
            return Campaign({command: clean[command] for command in commands}, tuple(f.result() for f in trying))
        finally:
            with _uninterrupted():
                runner.stop()
                pool.shutdown(cancel_futures=True)


def _try(runner: Commands, clean: dict[str, Outcome], mutation: Mutation, root: Path) -> Result:
    """Run the commands that pass on the unchanged source until one catches the mutation."""
    result = Result(mutation, ())
    with mutated(root, mutation):
        for command in mutation.caught_by:
            if clean[command].kind == "passed" and not result.caught:
                result = Result(mutation, (*result.tried, (command, runner.run(command, root))))
    return result


@contextmanager
def _copies(source: Path, count: int) -> Iterator[Queue[Path]]:
    """Yield a queue of `count` copies of the work tree: its current files, except those that git ignores.

    Bytecode is validated by a hash of the source. By time and size, Python could miss a change in the same second.
    """
    folder = Path(tempfile.mkdtemp(prefix="vitpar-mutations-"))
    try:
        first = folder / "0"
        for name in _files(source):
            with suppress(FileNotFoundError):  # deleted, but not in the index yet
                (first / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, first / name)
        for part in ("src", "cli"):
            mode = py_compile.PycInvalidationMode.CHECKED_HASH
            compileall.compile_dir(first / part, quiet=2, invalidation_mode=mode)
        roots: Queue[Path] = Queue()
        roots.put(first)
        for number in range(1, count):
            shutil.copytree(first, folder / str(number))
            roots.put(folder / str(number))
        yield roots
    finally:
        with _uninterrupted():
            for _ in range(50):  # ranks that lost their parent may still write files
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    break
                time.sleep(0.1)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM inside the ``with``, so that nothing is left behind."""
    in_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    former = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _files(source: Path) -> list[str]:
    command = ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise MutationError(f"git cannot list the files of '{source}': run this in a clone of the repository") from None
    return [name for name in done.stdout.split("\0") if name]
