"""Fit the planner's rates of a GPU to measurements of gpu_micro.py and bench_gpu.py.

    python experiments/gpu_refit.py OUT1 OUT2             # folders of gpu_programme.py run: changes and errors
    python experiments/gpu_refit.py OUT1 OUT2 --write     # change src/vitpar/clusters/<card>.toml

| rate                     | fitted to                                                                                 |
|--------------------------|-------------------------------------------------------------------------------------------|
| sustained_memory         | the copy                                                                                  |
| sustained                | products of all models: what their widest operand does not take, at the sustained clock   |
| kernels.attention, _tile | the fastest attention kernel of every shape, with tiles of 64 or 128                      |
| kernels.gap              | the step less the time that its kernels run, for each kernel; the median of the models    |

The planner and the dry bench read the same file. Predictions of steps before and after are printed: the fit does not
see the steps, but for the gaps, so their error shows whether the formulas hold.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu_models import card_of
from bench.harness import table
from bench.programme.compared import COLUMNS, fastest_attention, memory_rate, of, padded_flops, steps
from bench.programme.programmes import ROOT
from bench.programme.results import merged
from vitpar.planner.profile.cluster import Cluster, find_cluster

TILES = (64, 128)
"""Tokens of an attention tile that are tried."""
FITTED = ("sustained", "sustained_memory")


def main() -> int:
    """Fit, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="OUT", help="folders of gpu_programme.py run")
    parser.add_argument("--write", action="store_true", help="change the data sheet")
    options = parser.parse_args()
    try:
        results = merged(options.folders)
    except ValueError as error:
        parser.error(str(error))
    call = next((call for call in results["calls"] if call.get("cuda")), None)
    card = call and card_of(call["hardware"])
    if call is None or card is None:
        parser.error("no call ran on an H100 or H200: other cards have no programme")
    found = {run["job"]: run["found"] or {} for run in results["runs"]}
    micro, measured = (found.get(job, {}).get(key, []) for job, key in (("micro", "rows"), ("steps", "vitpar")))
    before = find_cluster(f"1x{card}")
    try:
        after = refitted(before, micro, measured)
    except ValueError as error:
        parser.error(str(error))
    shares = ([sheet.sustained, memory_rate(sheet) / sheet.memory_bandwidth] for sheet in (before, after))
    rows = [[name, *(f"{share:.3f}" for share in pair)] for name, *pair in zip(FITTED, *shares, strict=True)]
    old, new = (sheet.kernels.model_dump() for sheet in (before, after))
    rows += [[f"kernels.{name}", f"{old[name]:.3g}", f"{new[name]:.3g}"] for name in new]
    print("\n".join(table(("rate", "before", "after"), rows)))
    for title, sheet in (("before", before), ("after", after)):
        cells = [one.cells() for one in steps(measured, sheet, card) if "planner" in one.what]
        print("\n".join([f"Planner {title}:\n", *table(COLUMNS, cells)]))
    if options.write:
        path = ROOT / "src" / "vitpar" / "clusters" / f"{card}.toml"
        path.write_text(rewritten(path.read_text(), after, f"measured on {call['date']} at {call['commit'][:12]}"))
        print(f"written    {path.relative_to(ROOT)}: run the tests of tests/planner, and experiments/calibration.py")
    return 0


def refitted(sheet: Cluster, micro: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> Cluster:
    """Return the data sheet with rates fitted to rows of gpu_micro.py and of bench_gpu.py.

    Raises ValueError if rows are missing, or no rate up to the peak explains them.
    """
    copies, clocks = of(micro, "copy"), of(micro, "sustained")
    products = [row for row in of(micro, "product") if row["kind"] != "forward_onto_residual"]
    attended = fastest_attention(micro)
    if not (copies and clocks and products and attended):
        raise ValueError("rows of copy, sustained, product or attention are missing: run gpu_micro.py to its end")
    memory = copies[0]["bytes_per_second"]
    computing = sum(row["seconds"] - row["widest"] / memory for row in products)
    peak = sheet.matmul["bfloat16"]
    burst = sum(row["flops"] for row in products) / computing / peak if computing > 0 else 2.0
    clock = clocks[0]["burst"] / clocks[0]["seconds"]
    if not 0 < burst * clock <= 1:
        raise ValueError(
            f"products would run at {100 * burst * clock:.0f} % of the peak: moving the widest operand is not separate "
            "from computing, so change the formula in vitpar.planner.profile.estimate"
        )
    fits = {}
    for tile in TILES:
        flops = {shape: 3 * padded_flops(shape, tile) / (peak * burst) for shape in attended}
        taken = {shape: row["forward"] + row["backward"] for shape, row in attended.items()}
        share = sum(flops.values()) / sum(taken.values())
        fits[tile] = share, sum(abs(flops[shape] / share - taken[shape]) for shape in attended)
    tile = min(fits, key=lambda tile: fits[tile][1])
    gaps = [(median(row["seconds"]) - row["kernels"][1]) / row["kernels"][0] for row in measured if row["kernels"]]
    kernels = {"attention": min(1.0, fits[tile][0]), "attention_tile": tile}
    kernels["gap"] = max(0.0, median(gaps)) if gaps else sheet.kernels.gap
    return sheet.model_copy(
        update={
            "sustained": burst * clock,
            "sustained_memory": min(1.0, memory / sheet.memory_bandwidth),
            "kernels": sheet.kernels.model_copy(update=kernels),
        }
    )


def rewritten(text: str, sheet: Cluster, source: str) -> str:
    """Return the text of a data sheet with the fitted rates of `sheet`, each with its source."""
    text = re.sub(r"\n\[kernels\]\n(?:[^\[\n].*\n)*", "", text)
    text = re.sub(r"^(sustained|sustained_memory) = .*\n", "", text, flags=re.MULTILINE)
    rates = "".join(f"{name} = {getattr(sheet, name):.3f}\n" for name in FITTED)
    text = text.replace("sustained_bandwidth = ", rates + "sustained_bandwidth = ", 1)
    text = re.sub(r'^  "(?:sustained|sustained_memory|kernels)\b[^_].*\n', "", text, flags=re.MULTILINE)
    text = text.replace(
        "\n]\n", f'\n  "sustained, sustained_memory, kernels: {source} (experiments/gpu_refit.py)",\n]\n', 1
    )
    values = "".join(f"{name} = {value:.3g}\n" for name, value in sheet.kernels.model_dump().items())
    return text.rstrip("\n") + f"\n\n[kernels]\n{values}"


if __name__ == "__main__":
    sys.exit(main())
