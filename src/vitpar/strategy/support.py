"""Support matrix: features of a plan, and pairs of features that clash.

Refusals, the page docs/support.md and the combinations of the tests follow from this one table. Every plan without a
clash runs, with the same gradients as a single process.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from vitpar.errors import StrategyError
from vitpar.strategy.layer import Strategy
from vitpar.strategy.layout import shards_as_fsdp
from vitpar.strategy.plan import Plan
from vitpar.strategy.schedules import SCHEDULES
from vitpar.text import shown

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "data": ("no dp", "dp", "+zero1", "+zero2", "fsdp", "dp x fsdp"),
    "tensor": ("no tp", "tp", "+sp", "+2d", "+2.5d", "+3d"),
    "schedule": ("no pp", "gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev"),
    "precision": ("fp64", "fp32", "bf16", "fp16", "fp8"),
    "checkpoint": ("no ckpt", "+ckpt", "+ckpt.selective"),
    "offload": ("no offload", "+offload"),
    "compile": ("no compile", "compile"),
}
"""Features of a plan by dimension; a layer has one of each dimension.

Layers of one plan can differ in data, tensor, checkpoint and offload.
"""
APART = "weight gradients are computed in a separate backward, where they cannot be reduced at once"


@dataclass(frozen=True)
class Clash:
    """Two features that cannot be combined."""

    first: str
    """One feature, from DIMENSIONS."""
    second: str
    """The other feature."""
    because: str
    """Reason, a clause for messages and docs."""
    instead: str
    """Advice on what to use instead, in the imperative."""


_ONE_GRAPH = "input and weight gradients are computed separately, which a compiled block cannot do (pytorch#161904)"
_KEPT = "the split backward keeps in between what checkpointing would free (pytorch#136766)"
CLASHES = (
    *(
        Clash(schedule, feature, because, f"{instead} schedule 1f1b or interleaved1f1b")
        for feature, because, instead in (
            ("compile", _ONE_GRAPH, "leave out compile, or use"),
            ("+ckpt", _KEPT, "leave out +ckpt, or use"),
            ("+ckpt.selective", _KEPT, "leave out +ckpt.selective, or use"),
            ("+zero2", APART, "use +zero1, or"),
        )
        for schedule, properties in SCHEDULES.items()
        if properties.splits_backward
    ),
    Clash(
        "+ckpt.selective",
        "compile",
        "a compiled block cannot select single operations to save",
        "use +ckpt, or train.activation_memory_budget, which lets the compiler choose",
    ),
)
"""All pairs of features that clash.

Clashes of one dimension, such as +sp with +2d, cannot occur in a combination; ``vitpar.strategy.layer`` refuses them.
"""


def refuse_clashes(plan: Plan, precision: str, compile_blocks: bool) -> None:
    """Raise StrategyError if two features of a plan, its precision and compilation clash."""
    if clash := first_clash(features(plan, precision, compile_blocks)):
        raise StrategyError(
            f"{clash.first} clashes with {clash.second} in '{shown(plan)}', as {clash.because}: {clash.instead}"
        )


def first_clash(present: Collection[str]) -> Clash | None:
    """Return the first of `CLASHES` whose features are both `present`; None if there is none."""
    return next((clash for clash in CLASHES if clash.first in present and clash.second in present), None)


def refuse_apart(plan: Plan, reduce_every_microbatch: bool | None) -> None:
    """Raise StrategyError if gradients are to be reduced at once (``Communication``), but the schedule cannot."""
    if reduce_every_microbatch and plan.splits_backward and any(map(shards_as_fsdp, plan.distinct)):
        raise StrategyError(
            f"communication.reduce_every_microbatch clashes with {plan.schedule} in '{shown(plan)}', as {APART}: "
            "leave it out, or use schedule 1f1b or interleaved1f1b"
        )


def features(plan: Plan, precision: str, compile_blocks: bool) -> set[str]:
    """Return the features, by their names in DIMENSIONS, of a plan, its precision and compilation."""
    names = {plan.schedule if plan.pp != 1 else "no pp", precision, "compile" if compile_blocks else "no compile"}
    return names.union(*map(layer_features, plan.distinct))


def layer_features(strategy: Strategy) -> set[str]:
    """Return the features, by their names in DIMENSIONS, of a strategy."""
    data = [role for role in ("dp", "fsdp") if strategy.has(role)]
    return {
        f"+zero{strategy.zero}" if strategy.zero else " x ".join(data) or "no dp",
        strategy.tensor_flag.partition("@")[0] or ("tp" if strategy.has("tp") else "no tp"),
        {None: "no ckpt", "full": "+ckpt"}.get(strategy.checkpoint, f"+ckpt.{strategy.checkpoint}"),
        "+offload" if strategy.offload else "no offload",
    }
