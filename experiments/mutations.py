"""Put known faults into copies of the source, one at a time, and check that `vitpar check` or a test notices each.

    make mutations                                              # all of them, 6 minutes
    make mutations MUTATIONS="--parallel 8"
    python experiments/mutations.py --only tp-backward-sum ema-decay
    python experiments/mutations.py --list

Each mutation names the command that must notice it by a failed assertion or the verdict of the check. A crash does not
count. First every command runs on the unchanged source, where it must pass. The copies include
uncommitted changes; the work tree itself is never changed. Exit code 1: a mutation was not caught, or a command fails
on the unchanged source. Exit code 2: a mutation no longer fits the source. Ctrl-C removes the copies and all processes.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

from mutating.command import Commands, Outcome
from mutating.mutation import Mutation, MutationError, copy_tree, mutated, problem
from mutating.table import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Try the mutations; return the exit code."""
    options = arguments()
    chosen = [mutation for mutation in MUTATIONS if not options.only or mutation.name in options.only]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name}  {mutation.breaks}\n    {mutation.caught_by}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin = time.monotonic()
    try:
        if wrong := [words for mutation in chosen if (words := problem(ROOT, mutation))]:
            raise MutationError("\n".join(wrong))
        problems = run(ROOT, chosen, parallel=options.parallel, limit=options.limit)
    except MutationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("\n".join(["", *problems]))
    print(f"{len(chosen)} mutations, {len(problems)} problems, {(time.monotonic() - begin) / 60:.1f} minutes")
    return 1 if problems else 0


def run(source: Path, mutations: Sequence[Mutation], *, parallel: int, limit: float) -> list[str]:
    """Try mutations on copies of the git work tree `source`, several at a time; return the problems.

    limit: seconds for one command.

    Raises MutationError if `source` is not a git work tree. On Ctrl-C, raises KeyboardInterrupt after all processes
    have ended and the copies are deleted.
    """
    runner, copies = Commands(limit), Queue[Path]()
    # Ranks that lost their parent may still write files while the copies are deleted.
    with tempfile.TemporaryDirectory(prefix="vitpar-mutations-", ignore_cleanup_errors=True) as folder:
        for number in range(parallel):
            copies.put(copy_tree(source, Path(folder, str(number))))
        with ThreadPoolExecutor(parallel) as pool:

            def in_a_copy(job: Callable[[Path], Any]) -> Any:
                root = copies.get()
                try:
                    return job(root)
                finally:
                    copies.put(root)

            try:
                commands = list(dict.fromkeys(mutation.caught_by for mutation in mutations))
                waiting = {pool.submit(in_a_copy, partial(runner.run, command)): command for command in commands}
                clean = {
                    waiting[done]: shown("clean source", waiting[done], done.result()) for done in as_completed(waiting)
                }
                usable = {command for command, outcome in clean.items() if outcome.kind == "passed"}
                trying = [pool.submit(in_a_copy, partial(missed, runner, usable, mutation)) for mutation in mutations]
                found = [done.result() for done in as_completed(trying)]
            finally:
                runner.stop()
                pool.shutdown(cancel_futures=True)
    return [
        *(
            f"{outcome.kind.upper()} on the clean source: {command}\n  {outcome.words}"
            for command, outcome in clean.items()
            if command not in usable
        ),
        *filter(None, found),
    ]


def missed(runner: Commands, usable: set[str], mutation: Mutation, root: Path) -> str:
    """Return why the mutation was not caught, or an empty text. usable: commands that pass on the unchanged source."""
    what = f"{mutation.name}: {mutation.breaks}"
    if (command := mutation.caught_by) not in usable:
        return f"NOT RUN {what}"
    with mutated(root, mutation):
        outcome = shown(mutation.name, command, runner.run(command, root))
    verdict = "MISSED" if outcome.kind == "passed" else outcome.kind.upper()
    return "" if outcome.kind == "failed" else f"{verdict} {what}\n  {command}\n    {outcome.kind}: {outcome.words}"


def shown(what: str, command: str, outcome: Outcome) -> Outcome:
    """Print how a command ended and return it."""
    print(f"{what}: {outcome.kind} after {outcome.seconds:.0f} s  {command}  {outcome.words[:120]}", flush=True)
    return outcome


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutations alone")
    parser.add_argument("--list", action="store_true", help="print what each breaks and must be caught by, run nothing")
    parser.add_argument("--parallel", type=int, default=2, metavar="N", help="how many run at a time (2)")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for one command (300)")
    options = parser.parse_args()
    names = [mutation.name for mutation in MUTATIONS]
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"unknown mutation {unknown[0]}: --list prints their names")
    if options.parallel < 1 or options.limit <= 0:
        parser.error("--parallel and --limit must be positive: give 1 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
