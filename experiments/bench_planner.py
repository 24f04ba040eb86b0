"""Measure the duration of plan searches and the error of the planner's predictions.

    python experiments/bench_planner.py                          # about an hour on two cores
    python experiments/bench_planner.py --only search galvatron  # two minutes
    python experiments/bench_planner.py --only accuracy --ranks 4 --json rows.json
    python experiments/bench_planner.py --only accuracy --ranks 4 --recipe experiments/planner_swin.toml

- search: seconds of a search in one process, over all pipeline degrees, schedules and numbers of micro-batches.
  ViT-H/14 in bf16 on 8, 64 and 1024 H100 by data sheet, for 128 images per device and for a sweep over five batch
  sizes. Also a model of the shape of ViT-22B (arXiv 2302.05442, table 1) on 256 H100 with 16 images per device, and
  Swin-Huge-48, whose blocks are of several kinds.
- galvatron: ViT-Huge-32 on 8 GPUs with four memory budgets. Compares the plans that Galvatron's planner of 2022 and
  vitpar found, under the cost model of that planner (with its rounding of memory) and under vitpar's with the same
  profile.
- accuracy: the model of --recipe (planner.toml) on each number of CPU ranks: profile hardware and model, then run every
  example plan of `vitpar validate`. Shows predicted and measured time and memory, and the rank correlation of the
  times. Shows how much slower the plan predicted to be fastest is than the fastest one. "pace" is the time that the
  same work took compared with profiling; measured times are divided by it, except "by the clock".
  "repeat" is the difference between two measurements of a plan.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.galvatron_2022 import CONTEXT, MB, TABLE, UnderItsModel, imported, its_price, its_space, write_profiles
from bench.header import header
from vitpar.models import model_config
from vitpar.planner.automatic import make_search
from vitpar.planner.cost.price import price
from vitpar.planner.search.best import Search
from vitpar.planner.sources import estimated_costs
from vitpar.strategy import parse, validate

RECIPE = Path(__file__).parent / "planner.toml"
SWEEP = (32, 64, 128, 256, 512)
"""Images per device."""
LARGE = model_config(
    "vit_custom",
    patch_size=14,
    image_size=224,
    embed_dim=6144,
    depth=48,
    num_heads=48,
    mlp_hidden_dim=24576,
    num_classes=1000,
)
HUGE = model_config("vit_huge_patch14_224")
SWIN = model_config("swin_huge48_patch4_window7_224")
SEARCHES = (
    *(
        ("ViT-H/14", HUGE, name, images, 40e9)
        for name in ("8xH100", "8x8xH100", "128x8xH100")
        for images in ((128,), SWEEP)
    ),
    ("ViT-22B", LARGE, "32x8xH100", (16,), 72e9),
    *(("Swin-Huge-48", SWIN, name, (128,), 40e9) for name in ("8xH100", "8x8xH100", "128x8xH100")),
)
"""(model name, model, cluster, images per device for each batch size, memory budget of a rank in bytes)."""


def main() -> int:
    """Read the options, measure, print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TABLES, metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="worlds for accuracy")
    parser.add_argument("--recipe", type=Path, default=RECIPE, metavar="FILE", help="model for accuracy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    options = parser.parse_args()
    facts, found = header(), {}
    console = Console(width=200, highlight=False)
    for name, value in facts.items():
        console.print(f"- {name}: {value}", soft_wrap=True)
    for name in options.only or TABLES:
        tables, found[name] = TABLES[name](options.ranks, options.recipe)
        for title, table in tables:
            console.print(f"\n{title}\n")
            console.print(table)
        if options.json:
            options.json.write_text(json.dumps({"header": facts, **found}, indent=1))
    return 0


def search(_worlds: Sequence[int], _recipe: Path) -> tuple[list[tuple[str, Table]], list[dict[str, Any]]]:
    """Time the searches."""
    rows = []
    for model, config, name, images, memory in SEARCHES:
        costs = estimated_costs(config, name, "bf16")
        result = make_search(costs, tuple(n * costs.hardware.ranks for n in images), 2).best(memory)
        best = result.plans[0]
        row = {
            "model": model,
            "cluster": name,
            "batches": len(images),
            "seconds": result.seconds,
            "kinds": result.kinds,
            "strategies": result.strategies,
            "priced": result.priced,
            "plan": str(best.plan),
            "microbatches": best.plan.microbatches,
            "batch_size": best.batch_size,
            "images_per_second": best.images_per_second,
            "gap": result.gap,
        }
        rows.append(row)
    heads = (
        "model",
        "cluster",
        "batch sizes",
        "seconds",
        "kinds of plans",
        "strategies",
        "priced",
        "best",
        "at most better by",
    )
    table = Table(*heads, box=box.MARKDOWN)
    for row in rows:
        counts = (f"{row[key]:,}" for key in ("kinds", "strategies", "priced"))
        plan = f"{row['plan']}, batch {row['batch_size']}, {row['microbatches']} micro-batches"
        table.add_row(
            row["model"],
            row["cluster"],
            str(row["batches"]),
            f"{row['seconds']:.2f}",
            *counts,
            plan,
            f"{row['gap']:.2%}",
        )
    return [("search", table)], rows


def galvatron(_worlds: Sequence[int], _recipe: Path) -> tuple[list[tuple[str, Table]], list[dict[str, Any]]]:
    """Compare the images/s of the plans of both planners under both cost models."""
    heads = ("GB", "Galvatron's plan", "its model", "ours", "vitpar's plan", "its model", "vitpar's plan", "ours")
    table, rows = Table(*heads, box=box.MARKDOWN), []
    with tempfile.TemporaryDirectory() as folder:
        write_profiles(Path(folder))
        costs = imported(Path(folder))
    under_its, under_ours = UnderItsModel(costs), Search(its_space(costs.config), costs)
    for gigabytes, (_, batch_size, words) in TABLE.items():
        budget = gigabytes * 1024 * MB
        theirs = its_price(parse(words), batch_size)
        same = price(validate(parse(words), costs.config, batch_size), costs, batch_size)
        found, ours = under_its.best(budget).plans[0], under_ours.best(budget - CONTEXT * MB).plans[0]
        rows.append(
            {
                "gigabytes": gigabytes,
                "plan": words,
                "batch_size": batch_size,
                "its_model": theirs.images_per_second,
                "our_model": same.images_per_second,
                "our_model_gigabytes": same.memory_bytes / MB / 1024 + 1,
                "found_under_its_model": (str(found.plan), found.batch_size, found.images_per_second),
                "found_under_ours": (str(ours.plan), ours.batch_size, ours.images_per_second),
            }
        )
        speeds = (f"{p.images_per_second:.2f}" for p in (theirs, same, found, ours))
        its, here, mine, best = speeds
        table.add_row(
            str(gigabytes),
            f"{words}, batch {batch_size}",
            *(its, here),
            *(f"{found.plan}, batch {found.batch_size}", mine),
            *(f"{ours.plan}, batch {ours.batch_size}, {ours.plan.microbatches} micro-batches", best),
        )
    return [("galvatron", table)], rows


def accuracy(worlds: Sequence[int], recipe: Path) -> tuple[list[tuple[str, Table]], dict[str, Any]]:
    """Compare predictions with measurements for each number of ranks in `worlds`."""
    found = {}
    for ranks in worlds:
        with tempfile.TemporaryDirectory() as folder:

            def vitpar(*arguments: str, folder: str = folder) -> str:
                command = [sys.executable, "-m", "vitpar_cli.main", *arguments, "--device", "cpu"]
                return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout

            vitpar("profile", "hardware", "--ranks", str(ranks))
            model = ("--recipe", str(recipe.resolve()))
            vitpar("profile", "model", *model, "--ranks", str(ranks))
            found[str(ranks)] = json.loads(vitpar("validate", *model, "--json"))
    return [table for ranks, record in found.items() for table in accuracy_tables(ranks, record)], found


def accuracy_tables(ranks: str, record: dict[str, Any]) -> list[tuple[str, Table]]:
    """Return two tables for one number of ranks: a summary of the errors, and every plan."""
    heads = ("plan", "micro-batches", "schedule", "predicted ms", "measured ms", "error", "predicted MB", "measured MB")
    table = Table(*heads, "error", box=box.MARKDOWN)
    for row in record["rows"]:
        seconds = row["measured_seconds"]
        memory, priced = max(row["measured_memory_bytes"]), row["predicted_memory_bytes"]
        table.add_row(
            row["strategy"],
            str(row["microbatches"]),
            row["schedule"] if "pp" in row["strategy"] and "pp1" not in row["strategy"] else "",
            *(f"{1e3 * s:.0f}" for s in (row["predicted_seconds"], seconds)),
            f"{row['predicted_seconds'] / seconds - 1:+.1%}",
            *(f"{n / 1e6:.1f}" for n in (priced, memory)),
            f"{priced / memory - 1:+.1%}",
        )
    heads = ("ranks", "plans", "time: mean error", "largest", "by the clock", "largest", "pace")
    summed = Table(
        *heads,
        "repeat",
        "largest",
        "memory: mean error",
        "largest",
        "rank correlation",
        "chosen slower than best",
        box=box.MARKDOWN,
    )
    time, clocked, repeat, memory = (
        record[name] for name in ("time_error", "clocked_time_error", "repeat", "memory_error")
    )
    parts = (*time.values(), *clocked.values(), record["slowdown"], *repeat.values(), *memory.values())
    summed.add_row(
        ranks,
        str(len(record["rows"])),
        *(f"{part:.1%}" for part in parts),
        f"{record['rank_correlation']:.3f}",
        f"{record['chosen_slower_than_best']:.1%}",
    )
    return [(f"accuracy on {ranks} ranks", summed), (f"plans on {ranks} ranks", table)]


TABLES: dict[str, Callable[[Sequence[int], Path], tuple[list[tuple[str, Table]], Any]]] = {
    "search": search,
    "galvatron": galvatron,
    "accuracy": accuracy,
}

if __name__ == "__main__":
    sys.exit(main())
