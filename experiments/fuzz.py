"""Fuzz every reader of untrusted input.

Targets: images, shards, indices, data sets, checkpoints, weights, pickles, recipes, strategies, plans, profiles, runs
and web servers.

    make fuzz                                         # ten minutes, an even share for every target
    make fuzz FUZZ="--minutes 60 --parallel 8"
    python experiments/fuzz.py --only image --only http --minutes 2
    python experiments/fuzz.py --cases 15             # triggers and 15 drawn cases of each target
    python experiments/fuzz.py --only image --again   # repeat triggers and findings, with complete tracebacks

hypothesis draws the cases, shrinks those that show something, and keeps them in `.hypothesis/fuzz`, from where the next
campaign repeats them. A reader must accept a case or refuse it with one sentence. It may use 5 s and 1 GiB above the
memory before the case, and must not start programs, connect anywhere, or write outside its folder. If the right result
is known, an accepted case is compared with it. Exit code 1: something was found. Ctrl-C stops early and prints the
findings so far.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"  # forked processes must not wait for threads of their parent

from fuzzing.campaign import Campaign, Tally, loaded  # noqa: E402
from fuzzing.guard import SECONDS, die_with_parent  # noqa: E402
from fuzzing.oracle import Finding  # noqa: E402
from fuzzing.readers import TARGETS  # noqa: E402

EVERY_S = 15.0
"""Seconds between lines of progress."""
LINES = 12
"""Lines of a finding that are shown: half from its begin, half from its end."""


def main() -> int:
    """Run the campaigns; return the exit code: 1 if something was found."""
    options, console = arguments(), Console()
    tallies = {name: Tally(name) for name in options.only or TARGETS}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        fuzz(tallies, options, console)
    found = [(tally.name, one) for tally in tallies.values() for one in tally.found.values()]
    for name, one in found:
        lines = [one.finding.kind.upper(), one.finding.sort, f"at {one.finding.where}, {one.times} cases"]
        said = one.finding.words.split("\n")
        said = said if options.again or len(said) <= LINES else [*said[: LINES // 2], "…", *said[-LINES // 2 :]]
        text = "\n  ".join(
            [" ".join(lines), f"python experiments/fuzz.py --only {name} --again", f"{one.folder}: {one.case}", *said]
        )
        printable = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be printed
        console.print(f"\n{escape(printable)}", highlight=False, soft_wrap=True)
    rows = Table("target", "cases", "accepted", "refused", "slowest s", "largest MiB", "findings", box=None)
    for tally in tallies.values():
        counts = f"{tally.cases:,}", f"{tally.accepted:,}", f"{tally.cases - tally.accepted:,}"
        rows.add_row(tally.name, *counts, f"{tally.slowest:.1f}", f"{tally.mib:,.0f}", str(len(tally.found)))
    console.print("", rows)
    return 1 if found else 0


def fuzz(tallies: dict[str, Tally], options: argparse.Namespace, console: Console) -> None:
    """Run a campaign for each tally, `options.parallel` at a time, each in a forked process that updates it."""
    for name in tallies:
        loaded(name)  # import torch and the readers once, for all
    seconds = 60 * options.minutes * min(options.parallel, len(tallies)) / len(tallies)
    waiting, running, shown = [*tallies], dict[Connection, str](), time.monotonic()
    fork = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < options.parallel:
            name, (reading, writing) = waiting.pop(0), fork.Pipe(duplex=False)
            fork.Process(target=campaign, args=(name, seconds, options, writing), daemon=True).start()
            writing.close()
            running[reading] = name
        for reading in wait([*running], EVERY_S):
            assert isinstance(reading, Connection)
            try:
                tallies[running[reading]] = reading.recv()
            except EOFError:
                tally = tallies[running.pop(reading)]
                if not tally.done:
                    tally.note(Finding("harness", "process", "?", "the process of the campaign ended"))
        if time.monotonic() - shown > EVERY_S:
            shown = time.monotonic()
            cases, found = (
                sum(counts) for counts in zip(*((t.cases, len(t.found)) for t in tallies.values()), strict=True)
            )
            console.print(
                f"{cases:,} cases, {found} findings, {len(waiting)} targets waiting, now {', '.join(running.values())}"
            )


def campaign(name: str, seconds: float, options: argparse.Namespace, writing: Connection) -> None:
    """Run one campaign and send its tally, from time to time and at the end."""
    die_with_parent()
    sent, found = 0.0, 0

    def changed(tally: Tally) -> None:
        nonlocal sent, found
        if time.monotonic() - sent > 1 or tally.done or len(tally.found) > found:
            writing.send(tally)
            sent, found = time.monotonic(), len(tally.found)

    with (
        tempfile.TemporaryDirectory(prefix="vitpar-fuzz-", ignore_cleanup_errors=True) as home,
        suppress(KeyboardInterrupt),
    ):
        run = Campaign(name, Path(home), options.keep, options.limit, changed=changed)
        run.run(seconds, options.seed, 0 if options.again else options.cases)


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    about = "\n".join(f"  {name:12}{loaded(name).about}" for name in TARGETS) if {"-h", "--help"} & {*sys.argv} else ""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"targets:\n{about}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="one of the targets below; may be repeated (all)"
    )
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="for all targets together (10)")
    parser.add_argument("--parallel", type=int, default=2, metavar="N", help="targets at a time (2)")
    parser.add_argument("--cases", type=int, metavar="N", help="drawn cases of every target, instead of --minutes")
    parser.add_argument(
        "--again", action="store_true", help="run only the triggers and the findings of former campaigns"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed draws other cases (0)")
    parser.add_argument("--limit", type=float, default=SECONDS, metavar="N", help=f"seconds of a case ({SECONDS:g})")
    parser.add_argument("--keep", type=Path, default=ROOT / ".hypothesis" / "fuzz", metavar="DIR", help="for findings")
    options = parser.parse_args()
    if unknown := [name for name in options.only or () if ":" not in name and name not in TARGETS]:
        parser.error(f"unknown target {unknown[0]}: targets are {', '.join(TARGETS)}")
    if options.again or options.cases is not None:
        options.minutes = 1e6
    return options


if __name__ == "__main__":
    sys.exit(main())
