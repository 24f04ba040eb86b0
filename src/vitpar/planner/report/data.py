"""Everything a search found, as data: the command's output, its JSON and the report are made of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vitpar.planner.cost.memory import Memory
from vitpar.planner.cost.price import Price
from vitpar.planner.profile.hardware import Hardware
from vitpar.planner.profile.model import ModelProfile
from vitpar.planner.search.best import Result, Search
from vitpar.planner.search.reasons import Reason, reasons
from vitpar.strategy import plan_to_json


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

    def to_json(self) -> dict[str, Any]:
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


def price_to_json(price: Price) -> dict[str, Any]:
    """A plan with its predicted time and memory, broken down."""
    return {
        "strategy": str(price.plan),
        "batch_size": price.batch_size,
        "images_per_second": price.images_per_second,
        "step_seconds": price.seconds,
        "step_breakdown_seconds": dict(price.time),
        "memory_bytes": price.memory_bytes,
        "memory_breakdown_bytes": [memory_to_json(memory) for memory in price.memory],
        "plan": plan_to_json(price.plan),
    }


def memory_to_json(memory: Memory) -> dict[str, float]:
    """Of the fullest rank at one place of the pp axis."""
    return {"total": memory.total, **asdict(memory)}
