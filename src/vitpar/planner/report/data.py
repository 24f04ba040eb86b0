"""Everything a search found, as data and in words: the command's output, its JSON and the report are made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from vitpar.planner.cost.price import Price
from vitpar.planner.profile.profiles import Hardware, ModelProfile
from vitpar.planner.search.best import Result, Search
from vitpar.planner.search.reasons import Reason, reasons
from vitpar.planner.search.scaling import Point, efficiency
from vitpar.strategy import Plan
from vitpar.strategy.plan_json import plan_to_json
from vitpar.text import count, size

ACTIONS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
"""Of a pipeline, by `Event.kind`."""
COLUMNS = ("micro-batches", "images/s", "beside the best", "a rank")
"""Headings of `figures`."""


def figures(price: Price, best: Price) -> tuple[str, ...]:
    """What is to be known of a plan at a glance."""
    return (
        str(price.plan.microbatches),
        f"{price.images_per_second:,.1f}",
        f"{price.images_per_second / best.images_per_second - 1:+.1%}",
        size(price.memory_bytes),
    )


def certainty(result: Result) -> str:
    """How much faster other plans may be."""
    how = "no plan is faster by 0.1 %" if result.exact else "not every plan was looked at"
    return f"{how}; no mix of strategies can be faster by more than {result.gap:.2%}"


def schedule_words(plan: Plan) -> str:
    """`` 1f1b`` where there are stages: what a strategy does not say."""
    return f" {plan.schedule}" if plan.pipeline_degree > 1 else ""


def plan_title(plan: Plan) -> str:
    """`pp2xdp4 1f1b, 4 micro-batches`."""
    return f"{plan}{schedule_words(plan)}, {count(plan.microbatches or 1, 'micro-batch')}"


def provenance(hardware: Hardware, model: ModelProfile) -> tuple[str, ...]:
    """What a reader should know of where the figures come from; nothing where all was measured."""
    notes = []
    if "estimated" in model.measured:
        notes.append("times are estimates: nothing was measured")
    if assumed := model.measured.get("assumed"):
        notes.append(f"{assumed} is assumed: name another with --precision")
    if source := model.measured.get("by"):
        notes.append(f"profiles were imported from {source}; {model.measured.get('unmeasured', '')}")
    if corrected := model.measured.get("corrected"):
        notes.append(f"profiles were corrected: {corrected}")
    return tuple(notes)


@dataclass(frozen=True)
class Findings:
    """result: the plans. budget: bytes a rank may take. frontier: the best plans for less and less memory. reasons: why
    the obvious plans were not chosen. notes: where the figures come from."""

    result: Result
    budget: float
    frontier: tuple[Price, ...]
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Seconds, bytes; plans as plan.json has them."""
        result = self.result
        return {
            "notes": list(self.notes),
            "search_seconds": result.seconds,
            "memory_budget_bytes": self.budget,
            "exact": result.exact,
            "images_per_second_bound": result.bound,
            "looked_at": {"strategies": result.strategies, "kinds": result.kinds, "priced": result.priced},
            "plans": [price_to_json(price) for price in result.plans],
            "frontier": [price_to_json(price) for price in self.frontier],
            "why_not": [
                {
                    "strategy": reason.plan,
                    "why": reason.why,
                    **({} if reason.price is None else price_to_json(reason.price)),
                }
                for reason in self.reasons
            ],
        }


def findings(search: Search, result: Result, budget: float) -> Findings:
    """What there is to say of a search that found something."""
    best = result.plans[0]
    notes = provenance(search.costs.hardware, search.costs.model)
    return Findings(result, budget, search.frontier(best), reasons(search, best, budget), notes)


def price_to_json(price: Price) -> dict[str, object]:
    """A plan with its predicted time and memory, broken down; memory is of the fullest rank at each place of the pp
    axis."""
    return {
        "strategy": str(price.plan),
        "batch_size": price.batch_size,
        "images_per_second": price.images_per_second,
        "step_seconds": price.seconds,
        "step_breakdown_seconds": dict(price.time),
        "memory_bytes": price.memory_bytes,
        "memory_breakdown_bytes": [{"total": memory.total, **asdict(memory)} for memory in price.memory],
        "plan": plan_to_json(price.plan),
    }


def scaling_to_json(found: Mapping[str, Sequence[Point]], notes: Sequence[str]) -> dict[str, object]:
    """By kind of scaling, a point for each number of ranks; no plan where nothing fits. notes: where figures come
    from."""
    points = {
        kind: [
            {
                "ranks": point.ranks,
                "batch_size": point.batch_size,
                "efficiency": part,
                **({} if point.price is None else {"at_most_better_by": point.gap, **price_to_json(point.price)}),
            }
            for point, part in zip(points, efficiency(points), strict=True)
        ]
        for kind, points in found.items()
    }
    return {"notes": list(notes), **points}


def trace(price: Price) -> dict[str, object]:
    """The events of one step in the Trace Event Format, which chrome://tracing and Perfetto show.

    Times are in microseconds. A process is a place of the pp axis.
    Source: "Trace Event Format", Google, complete events (ph X).
    """
    places = sorted({event.pp for event in price.events})
    named = [{"name": "process_name", "ph": "M", "pid": pp, "tid": 0, "args": {"name": f"pp {pp}"}} for pp in places]
    events = [
        {
            "name": f"{ACTIONS[event.kind]} {event.microbatch}",
            "cat": event.kind,
            "ph": "X",
            "pid": event.pp,
            "tid": 0,
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {"stage": event.stage, "microbatch": event.microbatch},
        }
        for event in price.events
    ]
    return {"traceEvents": [*named, *events], "displayTimeUnit": "ms", "otherData": {"plan": str(price.plan)}}
