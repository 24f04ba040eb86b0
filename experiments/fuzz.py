"""Fuzz every reader of untrusted input.

Targets: shards, indices, checkpoints, weights, pickles, recipes, strategies, plans, profiles, archives, images and web
servers.

    make fuzz                                            # ten minutes, an even share for every target
    make fuzz FUZZ="--seconds 3600 --parallel 8"
    python experiments/fuzz.py --target image --target stream --seconds 120
    python experiments/fuzz.py --cases 15                # 15 cases of each target
    python experiments/fuzz.py --target image --case 17  # repeat one case and print its traceback
    python experiments/fuzz.py --target image --case 17 --keep /tmp/case        # and keep its files

A reader must accept a case or refuse it with one sentence. It may use 5 s and 1 GiB above the memory before the case,
and must not start any program (`fuzzing/guard.py`). If the right result is known, an accepted case is compared with it
(`fuzzing/oracle.py`). All random seeds are fixed: with the same library versions, a case has the same bytes on every
machine. Exit code 1: something was found. Ctrl-C stops early and prints the findings so far.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from fuzzing import report
from fuzzing.hunt import Slot, Tally, hunt
from fuzzing.target import found, names

EVERY_S = 15.0
"""Seconds between lines of progress when the output is not a terminal."""


def main() -> int:
    """Run the cases; return the exit code: 1 if something was found."""
    options = arguments()
    console = Console()
    if options.case is not None:
        return one(options, console)
    tallies = {name: Tally(name) for name in options.target or names()}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), Progress(console, tallies) as shown:
        hunt(
            tallies,
            parallel=options.parallel,
            seconds=options.seconds,
            cases=options.cases,
            changed=shown.update,
        )
    report.show(console, tallies)
    return 1 if any(tally.found for tally in tallies.values()) else 0


def one(options: argparse.Namespace, console: Console) -> int:
    """Repeat one case and print its result; return the exit code."""
    tally = Tally(options.target[0])
    with Slot() as slot:
        slot.attack(tally, options.case, options.case, 1e9)
        if options.keep:
            shutil.copytree(slot.case, options.keep, symlinks=True)
    print("accepted" if tally.accepted else tally.told or "the reader ended its process")
    report.show(console, {tally.name: tally}, whole=True)
    return 1 if tally.found else 0


class Progress:
    """Progress line: redrawn in place on a terminal, else printed every EVERY_S seconds."""

    def __init__(self, console: Console, tallies: dict[str, Tally]) -> None:
        self._console, self._tallies, self._lock, self._last = console, tallies, threading.Lock(), 0.0
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def update(self) -> None:
        """Show the current progress, unless it was shown just now."""
        with self._lock:
            if time.monotonic() - self._last < (0.2 if self._status else EVERY_S):
                return
            self._last = time.monotonic()
            if self._status:
                self._status.update(report.progress(self._tallies))
            else:
                self._console.print(report.progress(self._tallies), highlight=False)


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    targets = "\n".join(f"  {name:12}{found(name).what}" for name in names()) if {"-h", "--help"} & {*sys.argv} else ""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"targets:\n{targets}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", metavar="NAME", help="one of those below; may be repeated (all)")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="N", help="for all targets (600)")
    parser.add_argument("--parallel", type=int, default=2, metavar="N", help="worker processes (2)")
    parser.add_argument("--cases", type=int, metavar="N", help="of every target, however long that takes")
    parser.add_argument("--case", type=int, metavar="N", help="repeat this one alone")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="with --case: copy its files into a new folder")
    options = parser.parse_args()
    unknown = [name for name in options.target or () if ":" not in name and name not in names()]
    if unknown:
        parser.error(f"unknown target {unknown[0]}: targets are {', '.join(names())}")
    if options.case is not None and len(options.target or ()) != 1:
        parser.error("--case needs one --target")
    return options


if __name__ == "__main__":
    sys.exit(main())
