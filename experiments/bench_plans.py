"""Compare plans with theory: traffic, pipeline bubbles, memory, and a layerwise plan with uniform ones.

    python experiments/bench_plans.py                        # about 5 minutes on two cores
    python experiments/bench_plans.py --only bubble memory   # some of the tables
    python experiments/bench_plans.py --quick                # two rows of each table: to see the program run

- traffic: elements that a rank receives in forward and backward of one block and one micro-batch, counted while it
  runs and computed for ring collectives. Activations are computed by `vitpar.strategy.traffic`, and also as if tensors
  gathered in forward were kept for backward, which costs memory. Weights include their gradients.
- bubble: idle share of a step under pp4, compared with the theory of `vitpar plan`. The stages sleep instead of
  computing, so that they need no cores; forward, input gradients and weight gradients take equally long. The excess
  over theory is the cost of sending and scheduling.
- memory: growth of each rank's resident memory for a model with small activations. After a step it is compared with
  parameters and moments as in `vitpar plan` (gradients are freed by then). The peak within a step is compared with
  these plus gradients, gathered parameters and communication buffers.
- layerwise: step times of a plan whose two halves differ, in turns with both uniform plans.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.header import header
from bench.resident import ENVIRONMENT
from bench.timing import Spread, ratio
from vitpar.launch import spawn
from vitpar.strategy import parse

TRAFFIC = ("tp4", "tp4+sp", "tp4+2d", "tp8", "tp8+sp", "tp8+2.5d", "tp8+3d", "fsdp8")
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
MEMORY = ("dp2", "dp2+zero1", "dp2+zero2", "fsdp2", "pp2", "pp2xfsdp2")
LAYERWISE = ("dp2", "pp1: 0-2=dp2, 3-5=fsdp2", "fsdp2")


def main() -> int:
    """Read the options, measure, print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TABLES, metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--quick", action="store_true", help="two rows of each table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    options = parser.parse_args()
    facts, found = header(), {}
    console = Console(width=200, highlight=False)
    for name, value in facts.items():
        console.print(f"- {name}: {value}", soft_wrap=True)
    for name in options.only or TABLES:
        with Console(stderr=True).status(f"{name} …"):
            table, found[name] = TABLES[name](2 if options.quick else None)
        console.print(f"\n{name}\n")
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"header": facts, **found}, indent=1))
    return 0


def measure(what: str, *words: str, ranks: int, env: Mapping[str, str] = {}) -> Any:
    """Run ``bench.plan_rank`` on new ranks and return its measurements.

    what: table. words: further arguments. env: additional environment variables.
    """
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        argv = ["-m", "bench.plan_rank", what, str(output), *words]
        if spawn(ranks, argv, device="cpu", env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}):
            sys.exit(1)  # the ranks printed the reason
        return json.loads(output.read_text())


def traffic(most: int | None) -> tuple[Table, list[dict]]:
    """Compare the elements received with formulas.

    most: number of rows, None for all.
    """
    heads = ("mode", "activations, counted", "by the table", "if they were kept", "weights, counted", "by formula")
    table = Table(*heads, box=box.MARKDOWN)
    rows = [measure("traffic", mesh, ranks=parse(mesh).world_size) for mesh in TRAFFIC[:most]]
    for row in rows:
        figures = (row[key] for key in ("activations", "table", "kept", "weights", "weights_in_theory"))
        table.add_row(row["mesh"], *(f"{figure:,.0f}" for figure in figures))
    return table, rows


def bubble(most: int | None) -> tuple[Table, list[dict]]:
    """Compare the idle share of pp4 with theory."""
    table = Table("schedule", "micro-batches", "idle, measured", "in theory", box=box.MARKDOWN)
    rows = [measure("bubble", name, ranks=4) for name in SCHEDULES[:most]]
    for row in rows:
        idle = Spread.of(row["idle"])
        table.add_row(row["schedule"], str(row["microbatches"]), f"{idle.text(3)}", f"{row['theory']:.3f}")
    return table, rows


def memory(most: int | None) -> tuple[Table, list[dict]]:
    """Compare the resident memory of each rank with theory."""
    table = Table("plan", "rank", "after a step, MiB", "in theory", "at most, MiB", "in theory", box=box.MARKDOWN)
    rows = [
        row for mesh in MEMORY[:most] for row in measure("memory", mesh, ranks=parse(mesh).world_size, env=ENVIRONMENT)
    ]
    for row in rows:
        figures = (f"{row[key] / 2**20:.1f}" for key in ("rest", "state", "peak", "most"))
        table.add_row(row["mesh"], str(row["rank"]), *figures)
    return table, rows


def layerwise(most: int | None) -> tuple[Table, dict]:
    """Compare the step time of a layerwise plan with those of the uniform plans that it mixes."""
    table = Table("plan", "step, ms", "over the first", box=box.MARKDOWN)
    seconds = measure("layerwise", *LAYERWISE[:most], ranks=2)
    for mesh, times in seconds.items():
        beside = ratio(times, seconds[LAYERWISE[0]]).text(3)
        table.add_row(mesh, Spread.of([1e3 * s for s in times]).text(1), beside)
    return table, seconds


TABLES: dict[str, Callable[[int | None], tuple[Table, Any]]] = {
    "traffic": traffic,
    "bubble": bubble,
    "memory": memory,
    "layerwise": layerwise,
}

if __name__ == "__main__":
    sys.exit(main())
