"""Fuzz every reader of untrusted input.

Targets: images, shards, indices, data sets, checkpoints, weights, pickles, recipes, strategies, plans, profiles, runs
and web servers.

    make fuzz                                         # ten minutes, an even share for every target
    make fuzz FUZZ="--minutes 60 --parallel 8"
    python experiments/fuzz.py --only image --only http --minutes 2
    python experiments/fuzz.py --cases 15             # triggers and 15 drawn cases of each target
    python experiments/fuzz.py --only image --again   # repeat triggers and findings, with complete tracebacks

hypothesis draws the cases, shrinks those that show something, and keeps them in `.hypothesis/fuzz`, from where the next
campaign repeats them. A reader must accept a case or refuse it with one sentence. It may use 5 s, and must not start
programs, connect anywhere, or write outside its folder. If the right result is known, an accepted case is compared with
it. Exit code 1: something was found. Ctrl-C stops early and prints the
findings so far.
"""

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"  # forked processes must not wait for threads of their parent

from fuzzing.campaign import Campaign, Tally, loaded  # noqa: E402
from fuzzing.guard import FORK, SECONDS, die_with_parent  # noqa: E402
from fuzzing.readers import TARGETS  # noqa: E402

EVERY_S = 15.0
"""Seconds between lines of progress."""
LINES = 6
"""Lines of a finding that are shown from its begin, and from its end."""


def main() -> int:
    """Run the campaigns, `--parallel` at a time; return the exit code: 1 if something was found."""
    options, console = arguments(), Console()
    names = options.only or [*TARGETS]
    for name in names:
        loaded(name)  # import torch and the readers once, for all
    seconds = 60 * options.minutes * min(options.parallel, len(names)) / len(names)
    with ProcessPoolExecutor(options.parallel, FORK, die_with_parent) as pool:
        running = [pool.submit(campaign, name, seconds, options) for name in names]
        try:
            for done in as_completed(running):
                show(done.result(), options.again, console)
        except KeyboardInterrupt:  # the campaigns get it too, and return what they have
            pool.shutdown(cancel_futures=True)
    tallies = [done.result() for done in running if not done.cancelled()]
    rows = Table("target", "cases", "accepted", "refused", "slowest s", "largest MiB", "findings", box=None)
    for tally in tallies:
        counts = f"{tally.cases:,}", f"{tally.accepted:,}", f"{tally.cases - tally.accepted:,}"
        rows.add_row(tally.name, *counts, f"{tally.slowest:.1f}", f"{tally.mib:,.0f}", str(len(tally.found)))
    console.print("", rows)
    return 1 if any(tally.found for tally in tallies) else 0


def campaign(name: str, seconds: float, options: argparse.Namespace) -> Tally:
    """Run a campaign in a process of its own, print its progress, and return its outcome."""
    shown = time.monotonic()

    def progress(tally: Tally) -> None:
        nonlocal shown
        if time.monotonic() - shown > EVERY_S:
            print(f"{name}: {tally.cases:,} cases, {len(tally.found)} findings", flush=True)
            shown = time.monotonic()

    with tempfile.TemporaryDirectory(prefix="vitpar-fuzz-", ignore_cleanup_errors=True) as home:
        run = Campaign(name, Path(home), options.keep, options.limit, changed=progress)
        return run.run(seconds, options.seed, 0 if options.again else options.cases)


def show(tally: Tally, complete: bool, console: Console) -> None:
    """Print the findings of a target and how to repeat them."""
    for finding in tally.found.values():
        said = finding.words.split("\n")
        if len(said) > 2 * LINES and not complete:
            said = [*said[:LINES], "…", *said[-LINES:]]
        title = f"{finding.kind.upper()} {finding.sort} at {finding.where}"
        text = "\n  ".join([title, f"python experiments/fuzz.py --only {tally.name} --again", *said])
        printable = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be printed
        console.print(f"\n{escape(printable)}", highlight=False, soft_wrap=True)


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, metavar="N")
    add("--only", action="append", metavar="NAME", help=f"one of {', '.join(TARGETS)}; may be repeated (all)")
    add("--minutes", type=float, default=10.0, help="for all targets together (10)")
    add("--parallel", type=int, default=2, help="targets at a time (2)")
    add("--cases", type=int, help="drawn cases of every target, instead of --minutes")
    add("--seed", type=int, default=0, help="another seed draws other cases (0)")
    add("--limit", type=float, default=SECONDS, help=f"seconds of a case ({SECONDS:g})")
    add("--keep", type=Path, default=ROOT / ".hypothesis" / "fuzz", metavar="DIR", help="for findings")
    again = "run only the triggers and the findings of former campaigns"
    parser.add_argument("--again", action="store_true", help=again)
    options = parser.parse_args()
    if unknown := [name for name in options.only or () if ":" not in name and name not in TARGETS]:
        parser.error(f"unknown target {unknown[0]}: targets are {', '.join(TARGETS)}")
    if options.again or options.cases is not None:
        options.minutes = 1e6
    return options


if __name__ == "__main__":
    sys.exit(main())
