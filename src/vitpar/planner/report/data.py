"""Results of searches and predictions: the dictionaries that `--json` prints, and words and tables made from them.

Commands and pages draw these dictionaries. Numbers are in seconds and bytes, and not rounded; plans are as in
plan.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, plan_title
from vitpar.planner.profile.profiles import Hardware, ModelProfile
from vitpar.planner.report.uncertainty import uncertainty
from vitpar.planner.search.best import Search
from vitpar.planner.search.gains import Gain, shares
from vitpar.planner.search.ranking import Result, SearchEffort
from vitpar.planner.search.reasons import reasons
from vitpar.strategy import Plan
from vitpar.strategy.plan_json import plan_from_json, plan_to_json
from vitpar.text import size

Record = Mapping[str, Any]
"""A result, or a part of one, as JSON."""
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Headings of all columns but the last, which has a plan, and rows."""
COLUMNS = ("micro-batches", "samples/s", "vs. best", "memory")
"""Headings of `figures`."""
USEFUL_GAP = 0.25
"""Largest gap between the best plan and the bound that is printed; a larger one says nothing."""
MOST_GAIN = 0.0005
"""Change of the time per image below which a change of the machine counts as none."""


def origin_to_json(origin: Record, costs: LayerCosts) -> dict[str, Any]:
    """Return the model, machine and precision of a prediction with its `origin`: version and command."""
    return {
        **origin,
        "model": costs.config.name,
        "precision": costs.model.precision,
        "compiled": costs.model.compiled,
        "hardware": costs.hardware.name,
        "device": costs.hardware.device_name,
        "device_type": costs.hardware.device,
        "notes": list(provenance(costs.hardware, costs.model)),
    }


def plan_record(price: Price, costs: LayerCosts) -> dict[str, Any]:
    """Return a plan with its predicted time and memory, broken down.

    The breakdown of memory is that of the fullest rank at each place of the pp axis.
    """
    return {
        "strategy": str(price.plan),
        "batch_size": price.batch_size,
        "images_per_second": price.images_per_second,
        "mfu": price.mfu(costs),
        "uncertainty": uncertainty(price, costs),
        "step_seconds": price.seconds,
        "step_breakdown_seconds": dict(price.time),
        "step_shares": shares(price),
        "memory_bytes": price.memory_bytes,
        "memory_breakdown_bytes": [{"total": memory.total, **asdict(memory)} for memory in price.memory],
        "plan": plan_to_json(price.plan),
    }


def search_record(
    search: Search,
    result: Result,
    budget: float,
    origin: Record,
    *,
    train: str = "",
    training: Record | None = None,
    gains: Iterable[Gain] = (),
    frontier: bool = True,
) -> dict[str, Any]:
    """Return the results of a search that found a plan.

    `plans` has the best first, `frontier` the fastest plans for decreasing memory, `why_not` the obvious plans with the
    reason why they are not the best; those that fit and belong to the space join `plans`.

    budget: memory limit of a rank, in bytes.
    train: command that trains the best plan; empty for none.
    training: duration of the complete training with the best plan; None if its length is unknown.
    gains: effects of a better machine or a larger batch on the best plan, the most helpful first.
    frontier: whether to look for the plans with less memory.
    """
    best, costs = result.plans[0], search.costs
    obvious = reasons(search, best, budget)
    listed = [price for reason in obvious if (price := reason.price) and search.space.covers(price.plan)]
    result = result.with_alternatives(price for price in listed if price.memory_bytes <= budget)
    return {
        **origin_to_json(origin, costs),
        "train": train,
        "training": training,
        "what_would_help": gain_records(gains),
        "search_seconds": result.seconds,
        "memory_budget_bytes": budget,
        "exact": result.exact,
        "images_per_second_bound": result.bound,
        "looked_at": {"strategies": result.strategies, "kinds": result.outlines, "priced": result.priced},
        "plans": [plan_record(price, costs) for price in result.plans],
        "frontier": [plan_record(price, costs) for price in search.frontier(best)] if frontier else [],
        "why_not": [
            {"strategy": one.plan, "why": one.why, **(plan_record(one.price, costs) if one.price else {})}
            for one in obvious
        ],
        "batch_sizes": [],
    }


def gain_records(gains: Iterable[Gain]) -> list[dict[str, Any]]:
    """Return the changes with the plan that is best after each, the most helpful first."""
    return [
        {
            "change": gain.change,
            "time_per_image": gain.time,
            "strategy": str(gain.price.plan),
            "batch_size": gain.price.batch_size,
            "images_per_second": gain.price.images_per_second,
            "memory_bytes": gain.price.memory_bytes,
            "plan": plan_to_json(gain.price.plan),
        }
        for gain in gains
    ]


def plan_of(record: Record) -> Plan:
    """Return the plan of a record."""
    return plan_from_json(record["plan"])


def title_of(record: Record) -> str:
    """Return the title of a record's plan."""
    return plan_title(plan_of(record))


def same(one: Record, other: Record) -> bool:
    """Return whether two records are of one plan and batch size."""
    return one["plan"] == other["plan"] and one["batch_size"] == other["batch_size"]


def listed(found: Record) -> list[Record]:
    """Return all plans of a search, each once: the best, then the others by images per second."""
    best, kept = found["plans"][0], list[Record]()
    for one in (*found["plans"][1:], *found["frontier"], *(one for one in found["why_not"] if "plan" in one)):
        if not any(same(one, other) for other in (best, *kept)):
            kept.append(one)
    return [best, *sorted(kept, key=lambda one: -one["images_per_second"])]


def duration(seconds: float) -> str:
    """Return a duration with its unit, as in `1.36 s`, `262.7 ms` or `45.0 µs`."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} µs"


def speed_words(record: Record) -> str:
    """Return the predicted speed in words; uncertainty and MFU only if they are known.

    Example: `3,898.5 samples/s ± 4.0 %, 262.7 ms a step of 1,024 samples, MFU 49.4 %`.
    """
    words = f"{record['images_per_second']:,.1f} samples/s{f' {band}' if (band := band_words(record)) else ''}"
    words += f", {duration(record['step_seconds'])} per step of {record['batch_size']:,} samples"
    return words + ("" if record["mfu"] is None else f", MFU {record['mfu'] * 100:.1f} %")


def band_words(record: Record) -> str:
    """Return the uncertainty of a plan such as `± 4.0 %`; empty if it is not known."""
    doubt = record["uncertainty"]
    return doubt["source"].partition(":")[0] if doubt else ""


def sources(record: Record) -> tuple[str, ...]:
    """Return the sentence on the origin of a plan's uncertainty; empty if it is not known."""
    return (record["uncertainty"]["source"],) if record["uncertainty"] else ()


def figures(record: Record, best: Record) -> tuple[str, ...]:
    """Return a plan's figures in the order of `COLUMNS`. Plans within the uncertainty of the best are marked by `≈`."""
    return (
        str(record["plan"]["microbatches"] or 1),
        f"{record['images_per_second']:,.1f}",
        f"{record['images_per_second'] / best['images_per_second'] - 1:+.1%}{_mark(record, best)}",
        size(record["memory_bytes"]),
    )


def _mark(record: Record, best: Record) -> str:
    """Return the mark of a plan that is too close to the best to say which is faster, empty for others."""
    doubt, apart = best["uncertainty"], abs(record["images_per_second"] / best["images_per_second"] - 1)
    return " ≈" if doubt and not same(record, best) and apart < doubt["share"] else ""


def why_words(reason: Record, found: Record) -> str:
    """Return the text of a reason of `why_not`, with the mark of `figures` if its plan fits."""
    fits = "plan" in reason and reason["memory_bytes"] <= found["memory_budget_bytes"]
    return reason["why"] + (_mark(reason, found["plans"][0]) if fits else "")


def noise_words(best: Record) -> str:
    """Return the meaning of `≈` in a table of `figures`; empty if no uncertainty is known."""
    if not best["uncertainty"]:
        return ""
    within = "within the error of estimates" if best["uncertainty"]["of"] == "estimates" else "within the noise"
    return f"≈ {within} ({band_words(best)}) of the best: measure both to compare them"


def certainty(found: Record) -> str:
    """Return in words how much faster other plans may be."""
    best, bound = found["plans"][0]["images_per_second"], found["images_per_second_bound"]
    faster = max(one["images_per_second"] for one in found["plans"]) / best - 1
    gap = max(0.0, bound / best - 1) if bound else 0.0
    words = f"no mix of strategies can be more than {gap:.2%} faster"
    if gap > USEFUL_GAP:
        words = "not every plan was examined; no useful bound"
    if faster > SearchEffort().tolerance:
        words = f"the fastest plan found is {faster:.1%} faster and has more strategies; {words}"
    return words


def provenance(hardware: Hardware, model: ModelProfile) -> tuple[str, ...]:
    """Return notes on the origin of the figures; empty if all was measured."""
    notes = []
    if model.estimated:
        notes.append("times are estimates: nothing was measured")
    if assumed := model.measured.get("assumed"):
        notes.append(f"{assumed} is assumed: set another with --precision")
    if source := model.measured.get("by"):
        notes.append(f"profiles were imported from {source}; {model.measured.get('unmeasured', '')}")
    if corrected := model.measured.get("corrected"):
        notes.append(f"profiles were corrected: {corrected}")
    return tuple(notes)


def remarks(notes: Sequence[str], training: Record | None, plan: Record) -> list[str]:
    """Return notes on figures: their origin, the assumed length of the training, and the uncertainty of a plan."""
    return [*notes, *([training["assumed"]] if training and training["assumed"] else []), *sources(plan)]


def gain_table(gains: Iterable[Record], best: Record) -> Table:
    """Return a row for each change, with the plan that is best after it."""
    return ("time per sample", "change"), [
        (
            "as before" if abs(gain["time_per_image"]) < MOST_GAIN else f"{gain['time_per_image']:+.1%}",
            gain["change"],
            "same plan" if gain["plan"] == best["plan"] else title_of(gain),
        )
        for gain in gains
    ]
