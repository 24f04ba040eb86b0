"""Compare the planner's predictions from cluster data sheets with measured training runs.

    python experiments/calibration.py        # the page experiments/results/calibration_2026-11-30.md

Takes seconds and needs no GPU. The runs are in bench/published_runs.toml, with sources. Constants are fitted to runs of
PyTorch, in which vitpar is written:

| constants                                                         | fitted to runs of PyTorch |
|-------------------------------------------------------------------|---------------------------|
| rate of RTX 3090, passes of eager blocks and of unfused attention | on an RTX 3090            |
| rate of A100                                                      | on A100                   |
| loss by tensor parallelism                                        | with tp, on other cards   |
| host seconds of a layer                                           | of vitpar, held back by the host |

Every run is predicted by constants that are fitted without it. These errors make `vitpar.planner.report.uncertainty`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from bench.harness import table
from bench.header import header
from vitpar.io import read_toml
from vitpar.models import ViTConfig, model_config
from vitpar.planner.cost.layer import LayerCosts, tensor_name
from vitpar.planner.cost.price import price
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import FITTED, Fitted, estimate_model
from vitpar.planner.report.uncertainty import BANDS, OTHERS, VITPAR, Band
from vitpar.strategy import parse, validate

ROWS = Path(__file__).with_name("bench") / "published_runs.toml"
COVERED = 80
"""Percent of further runs that a band holds, if they are drawn like its own."""
UNFUSED = 9.0
"""Passes over the scores of attention in forward, if it writes them to memory. Fitted; vitpar's attention is fused."""
CAUSAL = 1.0
"""Rate of causal attention over 4,096 tokens relative to products, counting the half that it leaves out. Assumed."""
WEAK_SCALING = (0.94, 0.96)
"""Published efficiency of weak scaling from 8 to 128 GPUs (NeMo, ViT g/14)."""
Kind = tuple[str, bool, bool]
"""Kind of runs: stack, whether blocks are compiled, whether there are several GPUs."""
REMARKS = """
- An error is the measured speed over the predicted one, less 1: negative if the prediction is too fast.
- A run is inside if its error is at most the band of the other runs that would judge it. On several GPUs those are the
  runs of all stacks, because none is vitpar's and stacks differ most in what communication costs.
- Runs of one source resemble each other, so a run from elsewhere can be further off. JAX's runs are examples: nothing
  is fitted to them. Their reductions probably do not overlap with backward, which is not priced.
- The rates of H100 and H200 were measured kernel by kernel (experiments/gpu_refit.py), the gap between kernels in the
  steps of 1 to 4. They are not fitted again here.
- The eager run of ViT-5-S has RMSNorm, rotary positions and norms of queries and keys in many small kernels, which are
  not priced. So has Llama, which gains more by compiling than predicted.
- Steps of small models take as long as the host needs to launch their layers: one constant, fitted to three runs.
- The time of scaling for fp8 is fitted to the ratio of the run in fp8 to the one in bf16, so its error is that of bf16.
- Attention with a bias, as in T5, has the rate of the kernel that takes one, measured alone.
- Without any run: fp32, Swin, pipelines, +zero1 and +zero2, L40S, B200, RTX 4090.
- Tensor parallelism is fitted to tp2 and tp4 of Llama on H200. The ratios of JAX, on A100, are a check.
"""
"""Section of the page on what the tables do not say."""
ANY = "any"
"""Stack of the bands for several GPUs: no run is vitpar's, and stacks differ most in what communication costs."""


class Constants(NamedTuple):
    """Constants that are fitted to runs."""

    rtx3090: float
    """`sustained` of an RTX 3090."""
    a100: float
    """`sustained` of an A100."""
    unfused: float = UNFUSED
    eager: float = FITTED.eager
    tensor: float = FITTED.tensor
    host: float = FITTED.host


RATES = {"rtx3090": "RTX3090", "a100": "A100"}
"""Constants that are rates of products, with the card's data sheet. Times are linear in their inverse."""
GROUPS = {"RTX3090": ("rtx3090", "unfused", "eager"), "A100": ("a100",), "tp": ("tensor",), "host": ("host",)}
"""Constants that are fitted together, by group of runs."""


@dataclass(frozen=True, eq=False)
class Run:
    """Training run whose speed was measured."""

    number: int
    """Number in the tables."""
    row: dict[str, Any]
    """Fields of bench/published_runs.toml."""

    @property
    def counts(self) -> bool:
        """Return whether it counts: not if it is limited by something that is not priced."""
        return "limit" not in self.row

    @property
    def kind(self) -> Kind:
        """Return the kind of runs that it belongs to."""
        return self.row["stack"], self.row["compiled"], not self.row["cluster"].startswith("1x")

    @property
    def group(self) -> str | None:
        """Return the group of `GROUPS` that it belongs to; None if nothing is fitted to it."""
        card = self.row["cluster"].rpartition("x")[2]
        if self.row.get("host"):
            return "host"
        if self.row["stack"] != "PyTorch" or not self.counts:
            return None
        return card if card in GROUPS else "tp" if "tp" in self.row["plan"] else None


@dataclass(frozen=True)
class Compared:
    """Run with its prediction by constants that are fitted without it."""

    run: Run
    images: tuple[float, float]
    """Images/s per device, measured and predicted."""
    mfu: float
    """Predicted MFU, from 0 to 1."""

    @property
    def error(self) -> float:
        """Measured over predicted speed, less 1; negative if the prediction is too fast."""
        return self.images[0] / self.images[1] - 1


def main() -> None:
    """Print the page in Markdown."""
    compared = compare()
    print("# `--cluster` against measured runs\n")
    for name, value in header().items():
        print(f"- {name}: {value}")
    for title, lines in SECTIONS.items():
        print("\n".join(["", f"## {title}", "", *lines(compared)]).rstrip())


@cache
def runs() -> tuple[Run, ...]:
    """Return the runs of bench/published_runs.toml, numbered in their order."""
    found = read_toml(ROWS)
    rows = [{**source, **row} for source in found["sources"] for row in source["runs"]]
    models = {row["model"]: found["models"].get(row["model"], {"name": row["model"]}) for row in rows}
    return tuple(Run(number, {**row, "model": models[row["model"]]}) for number, row in enumerate(rows, 1))


def shipped() -> Constants:
    """Return the constants that predictions use."""
    return Constants(**{name: find_cluster(f"1x{card}").sustained for name, card in RATES.items()})


def predict(row: dict[str, Any], constants: Constants) -> tuple[float, float]:
    """Return images/s per device and MFU of a run: stack, cluster, model, plan, batch and how it computes."""
    config, cluster = model_config(**row["model"]), find_cluster(row["cluster"])
    for name, card in RATES.items():
        if row["cluster"].endswith(f"x{card}"):
            cluster = cluster.model_copy(update={"sustained": getattr(constants, name)})
    hardware = cluster.hardware()
    kernels: dict[str, Any] = {}
    if row.get("attention") == "causal":
        kernels = {"attention": CAUSAL}
    elif row.get("attention") == "unfused":
        assert hardware.copy_ is not None and isinstance(config, ViTConfig)
        computed = 4 * config.embed_dim / config.num_heads / (cluster.matmul["bfloat16"] * cluster.sustained)
        moved = constants.unfused * 2 / hardware.copy_.rate  # seconds of a score, as above
        kernels = {"attention": computed / (computed + moved), "attention_tile": 16}
    hardware = hardware.model_copy(update={"kernels": hardware.kernels.model_copy(update=kernels)})
    plan = replace(parse(row["plan"]), microbatches=row.get("microbatches", 1))
    chosen, ours = validate(plan, config, row["batch"]), row["stack"].startswith("vitpar")
    profile = estimate_model(
        config,
        row.get("precision", "bf16"),
        hardware,
        (tensor_name(chosen.strategy),),
        compiled=row["compiled"],
        # Other libraries update in several passes, and their blocks move the usual bytes.
        vitpar_blocks=ours,
        fitted=Fitted(constants.eager, constants.tensor, constants.host),
    )
    costs = LayerCosts(config, hardware, profile)
    found = price(chosen, costs, row["batch"])
    mfu = found.mfu(costs)
    assert mfu is not None
    return found.images_per_second / hardware.ranks, mfu


@cache
def measured(run: Run) -> float:
    """Return the measured images/s per device."""
    if "images" in run.row:
        return float(run.row["images"])
    images, mfu = predict(run.row, shipped())
    return float(run.row["mfu"]) * images / mfu


def fitted(group: str, without: Run | None = None) -> Constants:
    """Return the shipped constants with those of `group` fitted to its runs, by least squares of relative times."""
    pairs = [_response(run, GROUPS[group]) for run in runs() if run.group == group and run is not without]
    times, slopes = np.array([time for time, _ in pairs]), np.array([slopes for _, slopes in pairs])
    return _solved(shipped(), list(GROUPS[group]), times, slopes)


def _solved(start: Constants, names: list[str], times: np.ndarray, slopes: np.ndarray) -> Constants:
    """Return the constants that bring relative times next to 1; rates stay up to 1, as a data sheet's."""
    steps, *_ = np.linalg.lstsq(slopes, 1 - times)
    moved = {name: _moved(start, name, float(step)) for name, step in zip(names, steps, strict=True)}
    over = next((name for name in names if name in RATES and not 0 < moved[name] <= 1), None)
    if over is None:
        return start._replace(**moved)
    place = names.index(over)
    most = 1 - 1 / getattr(start, over)
    rest, slopes_left = names[:place] + names[place + 1 :], np.delete(slopes, place, axis=1)
    return _solved(start, rest, times + most * slopes[:, place], slopes_left)._replace(**{over: 1.0})


def _moved(start: Constants, name: str, by: float) -> float:
    """Return a constant after a step in what times are linear in."""
    value = getattr(start, name)
    return 1 / (1 / value + by) if name in RATES else value + by


@cache
def _response(run: Run, names: tuple[str, ...]) -> tuple[float, list[float]]:
    """Return the predicted time over the measured one, and its slopes."""
    start, step = shipped(), 0.01
    changed = (start._replace(**{name: _moved(start, name, step)}) for name in names)
    time, *others = (measured(run) / predict(run.row, constants)[0] for constants in (start, *changed))
    return time, [(other - time) / step for other in others]


@cache
def compare() -> tuple[Compared, ...]:
    """Predict every run by constants that are fitted without it."""
    found = []
    for run in runs():
        images, mfu = predict(run.row, shipped() if run.group is None else fitted(run.group, without=run))
        found.append(Compared(run, (measured(run), images), mfu))
    return tuple(found)


def band(errors: Iterable[float]) -> float:
    """Return the band that `COVERED` percent of further runs are in, from the errors of runs; in full percent."""
    found = sorted(map(abs, errors))
    return math.ceil(100 * found[-(-COVERED * (len(found) + 1) // 100) - 1]) / 100


def alike(kind: Kind, compared: Sequence[Compared]) -> list[Compared]:
    """Return the runs of a kind that count."""
    return [
        one for one in compared if one.run.counts and one.run.kind[1:] == kind[1:] and kind[0] in (ANY, one.run.kind[0])
    ]


def band_of_others(one: Compared, compared: Sequence[Compared]) -> float:
    """Return the band for a run from the other runs of the kind that would judge it."""
    stack, compiled, several = one.run.kind
    others = alike((ANY if several else stack, compiled, several), compared)
    return band(other.error for other in others if other is not one)


def inside(compared: Sequence[Compared]) -> Counter[bool]:
    """Return how many runs are in the band of the others, and how many are not."""
    return Counter(abs(one.error) <= band_of_others(one, compared) for one in compared if one.run.counts)


def table_of_runs(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the table of runs."""
    rows = []
    for one in compared:
        row, (rate, wanted) = one.run.row, one.images
        within = band_of_others(one, compared) if one.run.counts else None
        rows.append(
            [
                str(one.run.number),
                f"{row['run']}, {row['setting']}",
                row["plan"],
                row["stack"],
                f"{rate:,.4g}",
                f"{wanted:,.4g}",
                f"{one.mfu * rate / wanted:.1%}",
                f"{one.error:+.0%}",
                "–" if within is None else f"± {within:.0%}",
                f"limited: {row['limit']}" if within is None else "yes" if abs(one.error) <= within else "**no**",
            ]
        )
    yield from table(
        ("", "run", "plan", "stack", "images/s a device", "left-out prediction", "MFU", "error", "band", "inside"), rows
    )
    yes, no = inside(compared)[True], inside(compared)[False]
    yield f"Inside: {yes} of {yes + no}, {yes / (yes + no):.0%}. Target: {COVERED} %."


def table_of_bands(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the table of bands by kind of runs."""
    rows = []
    kinds = dict.fromkeys(one.run.kind for one in compared if one.run.counts)
    for kind in [*kinds, (ANY, True, True), (ANY, False, True)]:
        stack, compiled, several = kind
        errors = [one.error for one in alike(kind, compared)]
        rows.append(
            [
                stack,
                "compiled" if compiled else "eager",
                "several" if several else "one",
                str(len(errors)),
                f"{median(map(abs, errors)):.0%}",
                f"{mean(errors):+.0%}",
                f"{max(errors, key=abs):+.0%}",
                f"± {band(errors):.0%}",
                "yes" if kind in SHOWN else "",
            ]
        )
    columns = ("stack", "blocks", "GPUs", "runs", "median error", "mean with its sign", "largest", "band", "shown")
    yield from table(columns, rows)


def table_of_constants(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the table of fitted constants."""
    rows = []
    for group, names in GROUPS.items():
        left = [fitted(group, without=run) for run in runs() if run.group == group]
        for name in names:
            values = [getattr(one, name) for one in left]
            every = getattr(fitted(group), name)
            used = getattr(shipped(), name)
            rows.append([name, str(len(left)), f"{used:g}", f"{every:.3g}", f"{min(values):.3g} to {max(values):.3g}"])
    yield from table(("constant", "runs", "used", "fitted to all", "with one left out"), rows)


def _speeds(name: str, plan: str | None = None) -> tuple[float, float]:
    """Return the measured and predicted images/s of a run; of those with a name, that of a plan in micro-batches."""
    named = [run for run in runs() if run.row["run"] == name]
    (run,) = [run for run in named if plan is None or (run.row["plan"] == plan and "microbatches" in run.row)]
    return measured(run), predict(run.row, shipped())[0]


def table_of_ratios(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the table of ratios between runs, by the constants that predictions use."""
    jax, llama = "G/14, 32 A100", "Llama 3 7B, 4"
    pairs = {
        "compiled over eager, Llama 2 7B on 128 A100": (("Llama 2 7B, compiled",), ("Llama 2 7B, eager",)),
        "tp4 over fsdp4, Llama 3 7B on 4 H200": ((llama, "tp4+sp+ckpt"), (llama, "fsdp4+ckpt")),
        "dp8xtp4 over dp32, G/14 on 32 A100 (JAX)": ((jax, "dp8xtp4"), (jax, "dp32")),
        "dp4xtp8 over dp32, G/14 on 32 A100 (JAX)": ((jax, "dp4xtp8"), (jax, "dp32")),
        "128 over 8 A100, g/14 (NeMo)": (("g/14, 128 A100",), ("g/14, 8 A100",)),
        "128 over 8 H100, g/14 (NeMo)": (("g/14, 128 H100",), ("g/14, 8 H100",)),
    }
    rows = []
    for name, (one, other) in pairs.items():
        ratios = (over / under for over, under in zip(_speeds(*one), _speeds(*other), strict=True))
        rows.append([name, *(f"{ratio:.2f}" for ratio in ratios)])
    yield from table(("ratio", "measured", "predicted"), rows)


def weak_scaling() -> float:
    """Return the predicted images/s per device of g/14 on 128 H100 relative to 8, as NeMo ran it."""
    many, few = (_speeds(f"g/14, {number} H100")[1] for number in (128, 8))
    return many / few


def remarks(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield what the tables do not say."""
    yield from REMARKS.strip().splitlines()


def list_of_sources(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the sources of the runs."""
    for source in dict.fromkeys(run.row["source"] for run in runs()):
        numbers = [run for run in runs() if run.row["source"] == source]
        words = {key: run.row[key] for run in numbers for key in ("note", "assumed") if key in run.row}
        span = f"{numbers[0].number} to {numbers[-1].number}" if len(numbers) > 1 else str(numbers[0].number)
        assumed = f"; its {words['assumed']} is assumed" if "assumed" in words else ""
        yield f"- {span}: {source}{assumed}{'; ' + words['note'] if 'note' in words else ''}."


SHOWN: dict[Kind, Band] = {
    ("vitpar", True, False): VITPAR,
    ("vitpar, others", True, False): OTHERS,
    **{(ANY if several else "PyTorch", compiled, several): one for (compiled, several), one in BANDS.items()},
}
"""Bands of predictions, by the kind of runs that they rest on."""
SECTIONS = {
    "Runs": table_of_runs,
    "Bands": table_of_bands,
    "Constants": table_of_constants,
    "Ratios": table_of_ratios,
    "Remarks": remarks,
    "Sources": list_of_sources,
}
"""Sections of the page."""


if __name__ == "__main__":
    main()
