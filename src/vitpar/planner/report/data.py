"""Results of searches and predictions as JSON and as words, for the command line and the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property

from vitpar.pages.figures import rows_of
from vitpar.planner.comparison import BestPlan
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, plan_title
from vitpar.planner.profile.profiles import Hardware, ModelProfile
from vitpar.planner.report.timeline import timeline
from vitpar.planner.report.uncertainty import Uncertainty, uncertainty
from vitpar.planner.search.best import Search
from vitpar.planner.search.gains import Gain, shares
from vitpar.planner.search.ranking import SearchEffort
from vitpar.planner.search.reasons import Reason, reasons
from vitpar.planner.search.result import Result
from vitpar.planner.training_time import TrainingTime
from vitpar.strategy.plan_json import plan_to_json
from vitpar.text import size

COLUMNS = ("micro-batches", "samples/s", "vs. best", "memory")
"""Headings of `figures`."""
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Headings of all columns but the last, which has a plan, and rows."""
MOST_GAIN = 0.0005
"""Change of the time per image below which a change of the machine counts as none."""


def duration(seconds: float) -> str:
    """Return a duration with its unit, as in `1.36 s`, `262.7 ms` or `45.0 µs`."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} µs"


def speed_words(price: Price, costs: LayerCosts) -> str:
    """Return the predicted speed in words; uncertainty and MFU only if they are known.

    Example: `3,898.5 samples/s ± 4.0 %, 262.7 ms a step of 1,024 samples, MFU 49.4 %`.
    """
    doubt, mfu = uncertainty(price, costs), price.mfu(costs)
    words = f"{price.images_per_second:,.1f} samples/s{f' {doubt}' if doubt else ''}"
    words += f", {duration(price.seconds)} per step of {price.batch_size:,} samples"
    return words + ("" if mfu is None else f", MFU {mfu * 100:.1f} %")


def figures(price: Price, best: Price, doubt: Uncertainty | None = None) -> tuple[str, ...]:
    """Return a plan's figures in the order of `COLUMNS`.

    doubt: uncertainty of the best plan; plans within it are marked by `≈`
    """
    return (
        str(price.plan.microbatches or 1),
        f"{price.images_per_second:,.1f}",
        f"{price.images_per_second / best.images_per_second - 1:+.1%}{_mark(price, best, doubt)}",
        size(price.memory_bytes),
    )


def _mark(price: Price, best: Price, doubt: Uncertainty | None) -> str:
    """Return the mark of a plan that is within the uncertainty of the best, empty for others."""
    return " ≈" if doubt is not None and price is not best and doubt.covers(price, best) else ""


def noise_words(doubt: Uncertainty | None) -> str:
    """Return the meaning of `≈` in a table of `figures`; empty if no uncertainty is known."""
    within = "within the error of estimates" if doubt and doubt.band else "within the noise"
    return f"≈ {within} ({doubt}) of the best: measure both to compare them" if doubt else ""


def certainty(result: Result) -> str:
    """Return in words how much faster other plans may be."""
    best = result.plans[0].images_per_second
    faster = max(price.images_per_second for price in result.plans) / best - 1
    how = "not every plan was examined"
    if result.exact:
        how = f"no plan of the searched space is more than {max(SearchEffort().simpler, faster):.1%} faster"
    if faster > SearchEffort().tolerance:
        how = f"the fastest plan found is {faster:.1%} faster and has more strategies; {how}"
    return f"{how}; no mix of strategies can be more than {result.gap:.2%} faster"


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


def assumptions(training: TrainingTime | None) -> tuple[str, ...]:
    """Return the note on the assumed length of a training; empty if nothing is assumed."""
    return (training.assumed,) if training and training.assumed else ()


@dataclass(frozen=True)
class Provenance:
    """The program that made an output."""

    version: str
    """Version of vitpar."""
    command: str
    """Command line as it was typed."""

    def __str__(self) -> str:
        return f"vitpar {self.version}: {self.command}"


def origin_to_json(origin: Provenance, costs: LayerCosts) -> dict[str, object]:
    """Return the model, machine, precision, command and version of a prediction as JSON."""
    return {
        "vitpar": origin.version,
        "command": origin.command,
        "model": costs.config.name,
        "precision": costs.model.precision,
        "compiled": costs.model.compiled,
        "hardware": costs.hardware.name,
        "device": costs.hardware.device_name,
        "notes": list(provenance(costs.hardware, costs.model)),
    }


@dataclass(frozen=True)
class Findings:
    """Results of a search that found a plan."""

    result: Result
    """Plans, best first, and the bound."""
    budget: float
    """Memory limit of a rank, in bytes."""
    frontier: tuple[Price, ...]
    """The fastest plans for decreasing memory."""
    reasons: tuple[Reason, ...]
    """Reasons why the obvious plans were not chosen."""
    costs: LayerCosts
    """Costs of layers that the search used."""
    origin: Provenance
    """Version and command of the search."""
    train: str = ""
    """Command that trains the best plan; empty for none."""
    training: TrainingTime | None = None
    """Duration of the complete training with the best plan; None if its length is unknown."""
    gains: tuple[Gain, ...] = ()
    """Effects of a better machine or a larger batch on the best plan, the most helpful first."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the origin of the figures."""
        return provenance(self.costs.hardware, self.costs.model)

    @cached_property
    def doubt(self) -> Uncertainty | None:
        """Uncertainty of the best plan; None if it is not known."""
        return uncertainty(self.result.plans[0], self.costs)

    @cached_property
    def listed(self) -> tuple[Price, ...]:
        """All plans that the output lists, each once: the best, then the others by images per second."""
        best, *others = self.result.plans
        others += [*self.frontier, *(reason.price for reason in self.reasons if reason.price)]
        known = {(one.plan, one.batch_size): one for one in reversed([best, *others])}
        return best, *sorted((one for one in known.values() if one is not best), key=lambda one: -one.images_per_second)

    def why(self, reason: Reason) -> str:
        """Return the text of a reason, with the mark of `figures` if its plan fits."""
        fits = reason.price is not None and reason.price.memory_bytes <= self.budget
        return reason.why + (_mark(reason.price, self.result.plans[0], self.doubt) if reason.price and fits else "")

    def to_json(self) -> dict[str, object]:
        """Return the results as JSON, in seconds and bytes; plans as in plan.json."""
        result = self.result
        return {
            **origin_to_json(self.origin, self.costs),
            "train": self.train,
            "training": self.training and self.training.to_json(),
            "what_would_help": gains_to_json(self.gains),
            "search_seconds": result.seconds,
            "memory_budget_bytes": self.budget,
            "exact": result.exact,
            "images_per_second_bound": result.bound,
            "looked_at": {"strategies": result.strategies, "kinds": result.outlines, "priced": result.priced},
            "plans": [price_to_json(price, self.costs) for price in result.plans],
            "frontier": [price_to_json(price, self.costs) for price in self.frontier],
            "why_not": [
                {"strategy": one.plan, "why": one.why, **(price_to_json(one.price, self.costs) if one.price else {})}
                for one in self.reasons
            ],
        }


def findings(search: Search, result: Result, budget: float, origin: Provenance, train: str = "") -> Findings:
    """Collect the results of a search that found a plan, without the duration of a training and what would help.

    Obvious plans that fit and belong to the space join the list of plans.
    """
    best = result.plans[0]
    obvious = reasons(search, best, budget)
    listed = [price for reason in obvious if (price := reason.price) and search.space.covers(price.plan)]
    result = result.with_alternatives(price for price in listed if price.memory_bytes <= budget)
    return Findings(result, budget, search.frontier(best), obvious, search.costs, origin, train)


def price_to_json(price: Price, costs: LayerCosts) -> dict[str, object]:
    """Return a plan with its predicted time and memory, broken down.

    The breakdown of memory is that of the fullest rank at each place of the pp axis.
    """
    doubt = uncertainty(price, costs)
    return {
        "strategy": str(price.plan),
        "batch_size": price.batch_size,
        "images_per_second": price.images_per_second,
        "mfu": price.mfu(costs),
        "uncertainty": doubt and doubt.to_json(),
        "step_seconds": price.seconds,
        "step_breakdown_seconds": dict(price.time),
        "step_shares": shares(price),
        "memory_bytes": price.memory_bytes,
        "memory_breakdown_bytes": [{"total": memory.total, **asdict(memory)} for memory in price.memory],
        "plan": plan_to_json(price.plan),
    }


@dataclass(frozen=True)
class Prediction(BestPlan):
    """Predicted cost of one plan, which need not be the best, and what would make it faster."""

    gains: tuple[Gain, ...]
    """Effects of a better machine or a larger batch, the most helpful first."""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank needs at most the budget."""
        return self.price.memory_bytes <= self.budget


def prediction_to_json(prediction: Prediction, origin: Provenance) -> dict[str, object]:
    """Return a prediction as JSON, in seconds and bytes; the plan as in plan.json."""
    return {
        **origin_to_json(origin, prediction.costs),
        "memory_budget_bytes": prediction.budget,
        "fits": prediction.fits,
        "training": prediction.training.to_json(),
        "what_would_help": gains_to_json(prediction.gains),
        **price_to_json(prediction.price, prediction.costs),
    }


def gain_table(gains: Iterable[Gain], best: Price) -> Table:
    """Return a row for each change, with the plan that is best after it."""
    return ("time per sample", "change"), [
        (
            "as before" if abs(gain.time) < MOST_GAIN else f"{gain.time:+.1%}",
            gain.change,
            "same plan" if gain.price.plan == best.plan else plan_title(gain.price.plan),
        )
        for gain in gains
    ]


def gains_to_json(gains: Iterable[Gain]) -> list[dict[str, object]]:
    """Return the changes as JSON, the most helpful first."""
    return [
        {
            "change": gain.change,
            "time_per_image": gain.time,
            "strategy": str(gain.price.plan),
            "batch_size": gain.price.batch_size,
            "images_per_second": gain.price.images_per_second,
            "memory_bytes": gain.price.memory_bytes,
        }
        for gain in gains
    ]


def trace(price: Price, costs: LayerCosts, origin: Provenance) -> dict[str, object]:
    """Return the spans of one step in the Trace Event Format, for chrome://tracing and Perfetto.

    Times are in microseconds. Each row of the timeline is a process.
    Source: "Trace Event Format", Google, complete events (ph X).
    """
    spans = timeline(price, costs)
    rows = {row: number for number, row in enumerate(rows_of(spans))}
    named = [{"name": "process_name", "ph": "M", "pid": n, "tid": 0, "args": {"name": row}} for row, n in rows.items()]
    events = [
        {
            "name": span.what if span.microbatch is None else f"{span.what} {span.microbatch}",
            "cat": span.what,
            "ph": "X",
            "pid": rows[span.row],
            "tid": 0,
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "args": {"stage": span.stage, "microbatch": span.microbatch},
        }
        for span in spans
    ]
    about = {"plan": plan_title(price.plan), "batch_size": price.batch_size, **origin_to_json(origin, costs)}
    return {"traceEvents": [*named, *events], "displayTimeUnit": "ms", "otherData": about}
