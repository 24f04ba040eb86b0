"""Contenders measured side by side: turns, ratios, tables with a header, and measurements on several ranks.

Contenders take turns, so that other work on the machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from bench.header import header
from bench.json_file import write_json

EXPERIMENTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Times:
    """Seconds of every timed step of one contender."""

    wall: list[float] = field(default_factory=list)
    """Wall-clock time."""
    cpu: list[float] = field(default_factory=list)
    """CPU time of the process, all threads together."""


@dataclass(frozen=True)
class Spread:
    """Median and spread of measurements."""

    middle: float
    """Median."""
    half: float
    """Half the interquartile range."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least two values."""
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, (high - low) / 2)

    def text(self, digits: int) -> str:
        """Return text such as `1.034 ± 0.012`, with `digits` decimals."""
        return f"{self.middle:,.{digits}f} ± {self.half:,.{digits}f}"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the spread of the ratios `ours / theirs` of times that were measured in turn.

    The ratio is taken pair by pair: a slow spell of the machine changes both times of a pair, not their ratio.
    """
    return Spread.of(a / b for a, b in zip(ours, theirs, strict=True))


def turns(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the results of each round, in which every contender has one turn; every other round is reversed."""
    for number in range(rounds):
        yield {name: contenders[name]() for name in list(contenders)[:: 1 if number % 2 else -1]}


def take_turns(
    contenders: Mapping[str, Callable[[], object]], rounds: int, settle: Callable[[], object] = lambda: None
) -> dict[str, Times]:
    """Run each contender once per round and return its times.

    settle: waits until the devices and the other ranks have finished; called before each reading of the clock.
    """

    def timed(run: Callable[[], object]) -> tuple[float, float]:
        settle()
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        settle()
        return time.perf_counter() - wall, time.process_time() - cpu

    times = {name: Times() for name in contenders}
    for found in turns({name: lambda run=run: timed(run) for name, run in contenders.items()}, rounds):
        for name, (wall, cpu) in found.items():
            times[name].wall.append(wall)
            times[name].cpu.append(cpu)
    return times


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown and an empty line; nothing without rows."""
    if rows:
        yield from (f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))
        yield ""


class Report:
    """Header and tables of a program, printed as they are made, and written as JSON.

    path: JSON file of all measurements, None for none. facts: lines to add to the header.
    """

    def __init__(self, path: Path | None, **facts: str) -> None:
        self._path = path
        self.found: dict[str, Any] = {"header": header() | facts}
        for name, value in self.found["header"].items():
            print(f"- {name}: {value}", flush=True)

    def keep(self, name: str, measured: Any) -> None:
        """Write the measurements `measured` as `name`."""
        self.found[name] = measured
        if self._path:
            write_json(self._path, self.found)

    def show(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], measured: Any) -> None:
        """Print a table and write its measurements."""
        print("\n".join([f"\n{name}\n", *table(columns, rows)]), flush=True)
        self.keep(name, measured)


def parser(description: str | None, choices: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with --json, and with --only if there are `choices`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    if choices:
        made.add_argument("--only", nargs="+", choices=list(choices), metavar="NAME", help=f"of: {', '.join(choices)}")
    return made


def on_ranks(program: str, ranks: int, *words: str, **environment: str) -> Any:
    """Run `program` on new CPU ranks with `words` and return what rank 0 hands to `answer`; exit if a rank fails."""
    from vitpar.launch import spawn

    paths = (str(EXPERIMENTS), str(EXPERIMENTS.parent / "src"), os.environ.get("PYTHONPATH", ""))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "answer.json")
        given = {"PYTHONPATH": os.pathsep.join(paths), "BENCH_ANSWER": str(output), **environment}
        if spawn(ranks, [program, *words], env=given):
            sys.exit(1)  # the ranks printed the reason
        return json.loads(output.read_text())


def is_rank() -> bool:
    """Return whether `on_ranks` started this process."""
    return "BENCH_ANSWER" in os.environ


def answer(measure: Callable[..., Any]) -> NoReturn:
    """Join the world, call `measure` with the words of `on_ranks`, and hand rank 0's result to it."""
    import torch.distributed as dist

    from vitpar.launch import ALONE, find_world, join, reporting

    with reporting():
        join(find_world() or ALONE, "cpu")
        found = measure(*sys.argv[1:])
        if dist.get_rank() == 0:
            Path(os.environ["BENCH_ANSWER"]).write_text(json.dumps(found))
        dist.barrier()
        # A normal exit may deadlock: DDP's reducer, destroyed last, joins gloo's threads while it holds the GIL, which
        # one of them may need to free a tensor. Seen on torch 2.13. DCP's background process waits likewise.
        os._exit(0)


def slowest(seconds: Sequence[float]) -> list[float]:
    """Return the largest value of all ranks, one by one. Collective."""
    import torch
    import torch.distributed as dist

    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


RETURNS_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Environment in which `memory` is exact to a page: glibc maps blocks of 64 KiB separately, and unmaps freed ones."""


def memory(most: bool = False) -> int:
    """Return the resident bytes of this process on Linux, or with `most` their peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:" if most else "VmRSS:"))
