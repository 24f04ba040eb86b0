"""vitpar against what an engineer would write by hand for the same plan, on the CPU: step times side by side.

    python experiments/bench_cpu.py                        # about 5 minutes on two cores
    python experiments/bench_cpu.py --quick --only dp2     # seconds, a tiny model: does it run?

In each case both contenders live in the same processes and train the same ViT on the same batches: forward, backward,
clipping, AdamW, no data loading. Before anything is timed their losses and gradient norms of three steps must agree to
1e-4. Then they take turns step by step, so other work on the machine hits both alike; the ratio is taken pair by pair.
"±" is half the distance between the quartiles. The ratio of CPU time (all threads of all ranks) leaves out waiting, so
it is the steadier one on a busy machine. Memory is measured in runs of one contender each: how far the fullest rank's
resident memory grew at its peak beyond what it was after importing torch. "host" is a model so small that what the host
does for every operation is nearly all of a step.

Speeds are reported, not judged: the exit code is 1 only when a case fails, as when losses differ.
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
    """A case's seconds of every timed step (side -> wall | cpu -> list) and each side's memory in bytes."""

    case: Case
    seconds: dict[str, dict[str, list[float]]]
    memory_bytes: dict[str, int]

    def ratio(self, kind: str) -> Spread:
        """Seconds of vitpar over seconds by hand; kind: wall or cpu."""
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
        """Everything that was measured."""
        ratios = {kind: vars(self.ratio(kind)) for kind in ("wall", "cpu")}
        fields = {"case": self.case.name, "mesh": self.case.mesh, "target": self.case.target}
        return {**fields, "ratio": ratios, "seconds": self.seconds, "memory_bytes": self.memory_bytes}


def main() -> int:
    """The program; returns its exit code."""
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
    """Time a case, and its memory where `size` says so. None where a run failed, which has told why."""
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
    """One world of ranks (``bench.rank``) from start to end, and what it measured."""
    here = Path(__file__).parent
    environment = {
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")]),
        **({"OMP_NUM_THREADS": "1"} if size is QUICK else {}),  # steps too short to share, above all on a busy machine
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
