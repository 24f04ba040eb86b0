"""Time plan searches in one process, over all pipeline degrees, schedules and numbers of micro-batches.

    python experiments/bench_planner.py            # two minutes
    python experiments/bench_planner.py --only 8xH100

ViT-H/14 in bf16 on 8, 64 and 1024 H100 by data sheet, for 128 images per device and for a sweep over five batch sizes.
Also a model of the shape of ViT-22B (arXiv 2302.05442, table 1) on 256 H100 with 16 images per device, and
Swin-Huge-48, whose blocks are of several kinds.

The errors of predictions are measured by `vitpar profile hardware`, `vitpar profile model` and `vitpar validate`.
"""

from __future__ import annotations

import sys

from bench.harness import Report, parser
from vitpar.models import model_config
from vitpar.planner.automatic import make_search
from vitpar.planner.sources import estimated_costs

SWEEP = (32, 64, 128, 256, 512)
"""Images per device."""
VIT_22B = {"patch_size": 14, "image_size": 224, "embed_dim": 6144, "depth": 48, "num_heads": 48}
HUGE = model_config("vit_huge_patch14_224")
SWIN = model_config("swin_huge48_patch4_window7_224")
LARGE = model_config("vit_custom", **VIT_22B, mlp_hidden_dim=24576, num_classes=1000)
CLUSTERS = ("8xH100", "8x8xH100", "128x8xH100")
SEARCHES = (
    *(("ViT-H/14", HUGE, name, images, 40e9) for name in CLUSTERS for images in ((128,), SWEEP)),
    ("ViT-22B", LARGE, "32x8xH100", (16,), 72e9),
    *(("Swin-Huge-48", SWIN, name, (128,), 40e9) for name in CLUSTERS),
)
"""(model name, model, cluster, images per device for each batch size, memory budget of a rank in bytes)."""
COLUMNS = ("model", "cluster", "batch sizes", "seconds", "kinds", "strategies", "priced", "best plan", "gap")


def main() -> int:
    """Read the options, search and print the table."""
    given = parser(__doc__, dict.fromkeys(search[2] for search in SEARCHES)).parse_args()
    report, rows, found = Report(given.json), [], []
    for model, config, cluster, images, memory in SEARCHES:
        if cluster not in (given.only or cluster):
            continue
        costs = estimated_costs(config, cluster, "bf16")
        result = make_search(costs, tuple(n * costs.hardware.ranks for n in images), 2).best(memory)
        best = result.plans[0]
        counts = {"kinds": result.outlines, "strategies": result.strategies, "priced": result.priced}
        plan = f"{best.plan}, {best.plan.microbatches} micro-batches, batch {best.batch_size}"
        facts = {"model": model, "cluster": cluster, "batches": len(images), "seconds": result.seconds, **counts}
        found.append(facts | {"plan": plan, "gap": result.gap})
        counted = (f"{count:,}" for count in counts.values())
        rows.append([model, cluster, str(len(images)), f"{result.seconds:.1f}", *counted, plan, f"{result.gap:.2%}"])
        report.keep("searches", found)
    report.show("searches", COLUMNS, rows, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
