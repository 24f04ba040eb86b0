"""Compare the step time of vitpar with a hand-written loop for the same plan, on the CPU.

    python experiments/bench_cpu.py                        # about 5 minutes on two cores
    python experiments/bench_cpu.py --quick --only dp2     # seconds, a tiny model: does it run?

In each case both contenders run in the same processes and train the same ViT on the same batches: forward, backward,
clipping and AdamW, without data loading. Before timing, the losses and gradient norms of three steps must agree to
1e-4. Then the contenders take turns step by step, so that other work on the machine slows both alike. The ratio is the
median over pairs of steps, "±" half the interquartile range. The ratio of CPU time (all threads of all ranks) excludes
waiting, so it is steadier on a busy machine. Memory is measured in separate runs of one contender each: the peak
resident memory of the rank that uses most, minus its resident memory after importing torch. The model of case "host"
is so small that the host's overhead per operation is nearly all of a step.

Speeds are reported, not judged: the exit code is 1 only when a case fails, for example because losses differ.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.cases import CASES, FULL, QUICK, Case, Size
from bench.header import header
from bench.resident import ENVIRONMENT
from bench.timing import Spread, ratio
from vitpar.launch import spawn


@dataclass(frozen=True)
class Result:
    """Measurements of one case."""

    case: Case
    seconds: dict[str, dict[str, list[float]]]
    """Seconds of every timed step: side (hand, vitpar) -> clock (wall, cpu) -> list."""
    memory_bytes: dict[str, int]
    """Peak memory by side, in bytes; empty if it was not measured."""

    def ratio(self, kind: str) -> Spread:
        """Return the step time of vitpar divided by that of the hand-written loop.

        kind: clock, wall or cpu.
        """
        return ratio(self.seconds["vitpar"][kind], self.seconds["hand"][kind])

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        times = [Spread.of([1e3 * s for s in self.seconds[side]["wall"]]).text(0) for side in ("hand", "vitpar")]
        memory = " / ".join(
            f"{self.memory_bytes[side] / 2**20:.0f}" for side in ("hand", "vitpar") if self.memory_bytes
        )
        ratios = [self.ratio(kind).text(3) for kind in ("wall", "cpu")]
        return (self.case.name, self.case.by_hand, *times, *ratios, f"≤ {self.case.target}", memory or "not measured")

    def to_json(self) -> dict[str, Any]:
        """Return all measurements and their ratios."""
        ratios = {kind: vars(self.ratio(kind)) for kind in ("wall", "cpu")}
        fields = {"case": self.case.name, "mesh": self.case.mesh, "target": self.case.target}
        return {**fields, "ratio": ratios, "seconds": self.seconds, "memory_bytes": self.memory_bytes}


def main() -> int:
    """Read the options, measure, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and few steps, no memory: only to see it run"
    )
    parser.add_argument("--only", choices=list(CASES), action="append", help="this case; may be given again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    options_text = ", ".join(f"{key} {value}" for key, value in size.options)
    facts = header() | {"model": f"{size.model} ({options_text}), batch {size.batch_size}, fp32"}

    console = Console(width=None if sys.stdout.isatty() else 200)
    for name, value in facts.items():
        console.print(f"- {name}: {value}", highlight=False, soft_wrap=True)
    table = Table(
        *("case", "by hand", "by hand, ms", "vitpar, ms", "ratio", "ratio of CPU time", "target", "memory, MiB"),
        box=box.MARKDOWN,
    )
    results, failed = [], False
    progress = Console(stderr=True)
    with progress.status("") as status:
        for case in (CASES[name] for name in options.only or CASES):
            status.update(f"{case.name}: {case.by_hand}")
            result = measure(case, case.size or size)
            if result is None:
                failed = True
                table.add_row(case.name, case.by_hand, *(["failed"] + [""] * 5))
                continue
            results.append(result)
            table.add_row(*result.row())
            progress.print(f"{case.name}: ratio {result.ratio('wall').text(3)}", highlight=False)
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"header": facts, "cases": [r.to_json() for r in results]}, indent=1))
    return 1 if failed else 0


def measure(case: Case, size: Size) -> Result | None:
    """Measure step times of a case, and memory if `size.memory`. Return None if a run failed and printed why."""
    both = run(case, size, "both")
    if both is None:
        return None
    memory = {}
    for side in ("hand", "vitpar") if size.memory else ():
        alone = run(case, size, side)
        if alone is None:
            return None
        memory[side] = alone["memory_bytes"]
    return Result(case, both["seconds"], memory)


def run(case: Case, size: Size, side: str) -> dict[str, Any] | None:
    """Run ``bench.rank`` on all ranks of the case and return its measurements, or None if it failed.

    side: hand, vitpar or both.
    """
    here = Path(__file__).parent
    environment = {
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")]),
        # The steps of QUICK are too short to gain from several threads.
        **({"OMP_NUM_THREADS": "1"} if size is QUICK else {}),
        **(ENVIRONMENT if side != "both" else {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        name = "quick" if size is QUICK else "full"
        code = spawn(
            case.ranks, ["-m", "bench.rank", case.name, name, side, str(output)], device="cpu", env=environment
        )
        return json.loads(output.read_text()) if code == 0 else None


if __name__ == "__main__":
    sys.exit(main())
