"""Compare the planner's predictions from cluster data sheets with published training runs.

    python experiments/calibration.py

Takes seconds and needs no GPU. The runs are in bench/published_runs.toml, with sources. The constants of
`vitpar.planner.profile.estimate` and the clusters' `sustained` are fitted to the rows with odd numbers. The mean error
of the other rows is the error band of every prediction for a cluster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from bench.header import header
from vitpar.io import read_toml
from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts, tensor_name
from vitpar.planner.cost.price import price
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import ERROR_BAND, estimate_model
from vitpar.strategy import parse, validate

ROWS = Path(__file__).with_name("bench") / "published_runs.toml"
TARGET = 0.2
"""Target for the mean relative error of held-out rows."""
WEAK_SCALING = (0.94, 0.96)
"""Published efficiency of weak scaling from 8 to 128 GPUs (NVIDIA, ViT g/14; and others)."""
TENSOR = {"dp8xtp4": 0.62, "dp4xtp8": 0.43}
"""Published speed relative to dp32, for G/14 on 32 A100; the software was not recorded."""


@dataclass(frozen=True)
class Compared:
    """A published run and its prediction."""

    row: dict[str, Any]
    """Row of bench/published_runs.toml."""
    images: tuple[float | None, float]
    """Images/s per device, published and predicted. The published value is None if only MFU was published."""
    mfu: tuple[float, float]
    """MFU from 0 to 1, published and predicted."""

    @property
    def fitted(self) -> bool:
        """Return whether constants were fitted to this run."""
        return self.row["number"] % 2 == 1

    @property
    def counts(self) -> bool:
        """Return whether the run counts in means: not if it is limited by something that is not priced."""
        return "limit" not in self.row

    @property
    def error(self) -> float:
        """Relative error, positive if the prediction is too fast."""
        return self.mfu[1] / self.mfu[0] - 1


def main() -> None:
    """Print the tables in Markdown."""
    compared = compare()
    for name, value in header().items():
        print(f"- {name}: {value}")
    for lines in (runs, means, ratios):
        print("\n".join(["", *lines(compared)]))


def compare() -> list[Compared]:
    """Predict every row of bench/published_runs.toml."""
    found = []
    for row in read_toml(ROWS)["rows"]:
        images, mfu, published = *predict(row), row.get("images")
        of_run = row["mfu"] if published is None else published * mfu / images
        found.append(Compared(row, (published, images), (of_run, mfu)))
    return found


def predict(row: dict[str, Any]) -> tuple[float, float]:
    """Return images/s per device and MFU of a run: cluster, model, plan, batch and how it computes."""
    config, hardware = model_config(**row["model"]), find_cluster(row["cluster"]).hardware()
    plan = replace(parse(row["plan"]), microbatches=row.get("microbatches", 1))
    chosen = validate(plan, config, row["batch"])
    # Other libraries update in several passes, and their blocks move the usual bytes.
    settings = {"compiled": row["compiled"], "one_pass": False, "vitpar_blocks": False}
    precision, tensors = row.get("precision", "bf16"), (tensor_name(chosen.strategy),)
    costs = LayerCosts(config, hardware, estimate_model(config, precision, hardware, tensors, **settings))
    found = price(chosen, costs, row["batch"])
    mfu = found.mfu(costs)
    assert mfu is not None
    return found.images_per_second / hardware.ranks, mfu


def held_out_error(compared: Sequence[Compared]) -> float:
    """Return the mean relative error of the held-out rows."""
    return mean(abs(one.error) for one in compared if one.counts and not one.fitted)


def runs(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the table of runs."""
    yield "| row | run | images/s a device | predicted | MFU | predicted | error | use | remarks |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in compared:
        rate, wanted = one.images
        images = ("–", "–") if rate is None else (f"{rate:,.4g}", f"{wanted:,.4g}")
        use = "shown" if not one.counts else "fitted" if one.fitted else "held out"
        words = f"limited by {one.row['limit']}" if "limit" in one.row else one.row.get("note", "")
        cells = [str(one.row["number"]), one.row["run"], *images, *(f"{mfu:.1%}" for mfu in one.mfu)]
        yield f"| {' | '.join([*cells, f'{one.error:+.0%}', use, words])} |"


def means(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the table of mean errors of fitted and held-out rows."""
    yield "| rows | number | mean error | mean with its sign | largest |"
    yield "|---|---|---|---|---|"
    halves = {
        "fitted": [one for one in compared if one.counts and one.fitted],
        "held out": [one for one in compared if one.counts and not one.fitted],
        "held out, compiled": [one for one in compared if one.counts and not one.fitted and one.row["compiled"]],
        "held out, eager": [one for one in compared if one.counts and not one.fitted and not one.row["compiled"]],
    }
    for name, rows in halves.items():
        errors = [one.error for one in rows]
        worst = max(errors, key=abs)
        yield f"| {name} | {len(rows)} | {mean(map(abs, errors)):.1%} | {mean(errors):+.1%} | {worst:+.0%} |"
    verdicts = {
        name: "met" if mean(abs(one.error) for one in halves[name]) <= TARGET else "missed"
        for name in ("held out", "held out, compiled")
    }
    words = "; ".join(f"{name}: {verdict}" for name, verdict in verdicts.items())
    yield f"\nTarget: {TARGET:.0%} in the mean; {words}."
    yield f"Error band of predictions: {ERROR_BAND:.0%}, the mean error of held-out rows."


def ratios(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the table of ratios between runs."""
    eager, compiled = (one for one in compared if one.row["number"] == 14)
    gains = [two / one for one, two in zip(eager.mfu, compiled.mfu, strict=True)]
    kept = weak_scaling()
    yield "| ratio | published | predicted |"
    yield "|---|---|---|"
    yield f"| compiled over eager, Llama 2 7B | {gains[0]:.2f} | {gains[1]:.2f} |"
    for plan, published in TENSOR.items():
        yield f"| {plan} over dp32, G/14 on 32 A100 | {published:.2f} | {beside_dp32(plan):.2f} |"
    yield f"| weak scaling of g/14, 128 over 8 H100 | {WEAK_SCALING[0]:.0%} to {WEAK_SCALING[1]:.0%} | {kept:.1%} |"


def weak_scaling() -> float:
    """Return the predicted images/s per device of g/14 on 128 H100 relative to 8, with 64 images per micro-batch."""
    common = {"model": {"name": "vit_giant_patch14_224"}, "compiled": False, "microbatches": 8}
    few, many = (
        predict({**common, "cluster": f"{n}x8xH100", "plan": f"dp{8 * n}", "batch": 4096 * n})[0] for n in (1, 16)
    )
    return many / few


def beside_dp32(plan: str) -> float:
    """Return the predicted images/s of G/14 on 32 A100 under `plan` relative to dp32.

    The batch of 4,096 images is split into four micro-batches.
    """
    common = {"model": {"name": "vit_gigantic_patch14_224"}, "cluster": "4x8xA100", "batch": 4096, "compiled": False}
    one, other = (predict({**common, "plan": name, "microbatches": 4})[0] for name in (plan, "dp32"))
    return one / other


if __name__ == "__main__":
    main()
