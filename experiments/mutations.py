"""Put known faults into copies of the source, one at a time, and check that `vitpar check` or a test notices each.

    make mutations                                              # all of them, 6 minutes
    make mutations MUTATIONS="--parallel 8"
    python experiments/mutations.py --only tp-backward-sum ema-decay
    python experiments/mutations.py --list

Each mutation lists commands, at least one of which must notice it by a failed assertion or the verdict of the check. A
crash does not count. First every command runs on the unchanged source, where it must pass. The copies include
uncommitted changes; the work tree itself is never changed. Exit code 1: a mutation was not caught, or a command fails
on the unchanged source. Exit code 2: a mutation no longer fits the source. Ctrl-C removes the copies and all processes.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from mutating import report
from mutating.campaign import run
from mutating.mutation import Mutation, MutationError, problem
from mutating.table import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Try the mutations; return the exit code."""
    options, console = arguments(), Console()
    chosen = [mutation for mutation in MUTATIONS if not options.only or mutation.name in options.only]
    if options.list:
        return listed(console, chosen)
    if found := [words for mutation in chosen if (words := problem(ROOT, mutation))]:
        print("\n".join(f"error: {words}" for words in found), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin = time.monotonic()
    with console.status("copying the source") as status:

        def progress(done: int, total: int, name: str, ended: report.Ended) -> None:
            console.print(report.progress(done, total, name, ended), highlight=False, soft_wrap=True)
            status.update(f"{(time.monotonic() - begin) / 60:.0f} minutes")

        try:
            campaign = run(ROOT, chosen, parallel=options.parallel, limit=options.limit, progress=progress)
        except MutationError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130
    report.show(console, campaign, time.monotonic() - begin)
    return 0 if campaign.all_caught else 1


def listed(console: Console, mutations: list[Mutation]) -> int:
    """Print each mutation's name, its defect and the commands that must catch it; return the exit code."""
    for mutation in mutations:
        console.print(f"[bold]{mutation.name}[/]  {escape(mutation.breaks)}", highlight=False, soft_wrap=True)
        for command in mutation.caught_by:
            console.print(f"    {escape(command)}", highlight=False, soft_wrap=True)
    return 0


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
