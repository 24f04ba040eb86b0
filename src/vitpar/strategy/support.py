"""Support matrix: features of a plan, and pairs of features that clash.

Refusals, the page ``docs/support.md`` (`page`) and the combinations of the tests (`combinations`) follow from this one
table. Every plan without a clash runs, with the same gradients as a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from vitpar.errors import StrategyError
from vitpar.models.config import ModelConfig
from vitpar.models.families import model_config
from vitpar.models.roles import TABLE
from vitpar.strategy.grammar import parse
from vitpar.strategy.layout import shards_as_fsdp
from vitpar.strategy.plan import Plan
from vitpar.strategy.schedules import SCHEDULES
from vitpar.strategy.validate import unsplittable
from vitpar.text import shown

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "data": ("no dp", "dp", "+zero1", "+zero2", "fsdp", "dp x fsdp"),
    "tensor": ("no tp", "tp", "+sp", "+2d", "+2.5d", "+3d"),
    "schedule": (
        "no pp",
        "gpipe",
        "1f1b",
        "interleaved1f1b",
        "interleavedzerobubble",
        "zbvzerobubble",
        "dualpipev",
    ),
    "precision": ("fp64", "fp32", "bf16", "fp16", "fp8"),
    "checkpoint": ("no ckpt", "+ckpt", "+ckpt.selective"),
    "offload": ("no offload", "+offload"),
    "compile": ("no compile", "compile"),
}
"""Features of a plan by dimension; a layer has one of each dimension.

Layers of one plan can differ in data, tensor, checkpoint and offload.
"""
SMALLEST_TP = {"tp": "tp2", "+sp": "tp2+sp", "+2d": "tp4+2d", "+2.5d": "tp8+2.5d", "+3d": "tp8+3d"}
"""Smallest strategy with each tensor feature."""
MODELS = {
    "ViT": "vit_base_patch16_224",
    "Swin": "swin_base_patch4_window7_224",
    "MAE": "mae_vit_base",
    "BERT": "bert_base",
    "T5": "t5_base",
}
"""A model of each family, for the page."""
APART = "weight gradients are computed in a separate backward, where they cannot be reduced at once"
SPLIT_BACKWARD = tuple(name for name, schedule in SCHEDULES.items() if schedule.splits_backward)


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
        for schedule in SPLIT_BACKWARD
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
    present = features(plan, precision, compile_blocks)
    for clash in CLASHES:
        if clash.first in present and clash.second in present:
            raise StrategyError(
                f"{clash.first} clashes with {clash.second} in '{shown(plan)}', as {clash.because}: {clash.instead}"
            )


def refuse_apart(plan: Plan, reduce_every_microbatch: bool | None) -> None:
    """Raise StrategyError if gradients are to be reduced at once (``Communication``), but the schedule cannot."""
    if reduce_every_microbatch and plan.splits_backward and any(map(shards_as_fsdp, plan.distinct)):
        raise StrategyError(
            f"communication.reduce_every_microbatch clashes with {plan.schedule} in '{shown(plan)}', as {APART}: "
            "leave it out, or use schedule 1f1b or interleaved1f1b"
        )


def combinations(dimensions: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield every choice of one feature per dimension that contains no clash."""
    for choice in product(*(DIMENSIONS[dimension] for dimension in dimensions)):
        if not any(clash.first in choice and clash.second in choice for clash in CLASHES):
            yield choice


def splits(model: ModelConfig, tensor: str) -> bool:
    """Return whether the tensor feature `tensor`, at its smallest degree, can split every layer of a model."""
    if tensor == "no tp":
        return True
    strategy = parse(SMALLEST_TP[tensor]).strategy
    return not any(unsplittable(layer, strategy) for layer in model.kinds.values())


def page() -> str:
    """Return the matrix as Markdown: a table for every two dimensions with a clash, one of models, then the reasons."""
    lines = ["# Support matrix", "", PREFACE, ""]
    names = list(DIMENSIONS)
    for index, down in enumerate(names):
        for across in names[index + 1 :]:
            clashing = [c for c in CLASHES if {c.first, c.second} & set(DIMENSIONS[down])]
            if any({c.first, c.second} & set(DIMENSIONS[across]) for c in clashing):
                lines += [f"## {down} and {across}", "", *_table(down, across), ""]
    lines += ["## model and tensor", "", *_model_table(), "", "## Reasons and alternatives", ""]
    reasons: dict[tuple[str, str], list[Clash]] = {}
    for clash in CLASHES:
        reasons.setdefault((clash.because, clash.second), []).append(clash)
    for (because, second), clashes in reasons.items():
        lines.append(f"- {', '.join(c.first for c in clashes)} with {second}: {because}. Instead {clashes[0].instead}.")
    return "\n".join([*lines, *_model_reasons()]) + "\n"


PREFACE = """<!-- written by `make docs` from src/vitpar/strategy/support.py -->
Each layer chooses one feature of every row below; schedule, precision and compilation apply to the complete plan.
Every combination that is not refused here runs, and its gradients equal those of one process; the tests use the same
table. Degrees must divide what they split, which `vitpar plan` checks for a model and a batch.

""" + "\n".join(f"- **{name}**: {', '.join(f'`{f}`' for f in features)}" for name, features in DIMENSIONS.items())


def _table(down: str, across: str) -> list[str]:
    """Return the lines of the table of two dimensions."""

    def cell(a: str, b: str) -> str:
        return "refused" if any({c.first, c.second} == {a, b} for c in CLASHES) else "yes"

    return _rows(DIMENSIONS[down], DIMENSIONS[across], cell)


def _model_table() -> list[str]:
    """Return the lines of the table of models and tensor features."""
    configs = {family: model_config(name) for family, name in MODELS.items()}
    return _rows(MODELS, DIMENSIONS["tensor"], lambda f, tensor: "yes" if splits(configs[f], tensor) else "refused")


def _model_reasons() -> Iterator[str]:
    """Yield a line for the refusals of models: the roles of parts that a mode has no row for, and what to use."""
    found: dict[tuple[str, str], list[str]] = {}
    for family, config in ((family, model_config(name)) for family, name in MODELS.items()):
        if refused := [tensor for tensor in DIMENSIONS["tensor"] if not splits(config, tensor)]:
            rows = [TABLE[parse(SMALLEST_TP[tensor]).strategy.mode] for tensor in refused]
            roles = {part.role for layer in config.kinds.values() for part in layer.parts if part.role in TABLE["1d"]}
            unknown = sorted(f"`{role}`" for role in roles if not any(role in row for row in rows))
            found.setdefault((", ".join(refused), " and ".join(unknown)), []).append(family)
    for (tensor, parts), families in found.items():
        yield (
            f"- {tensor} with {', '.join(families)}: no rule of these modes splits parts with the roles {parts} "
            "(`vitpar.models.roles`). Instead use tp or +sp."
        )


def _rows(down: Iterable[str], across: Collection[str], cell: Callable[[str, str], str]) -> list[str]:
    """Return the lines of a table with the texts of `cell`."""
    rows = [f"| {a} | {' | '.join(cell(a, b) for b in across)} |" for a in down]
    return [f"| | {' | '.join(across)} |", f"|{'---|' * (1 + len(across))}", *rows]


def features(plan: Plan, precision: str, compile_blocks: bool) -> set[str]:
    """Return the features, by their names in DIMENSIONS, of a plan, its precision and compilation."""
    names = {plan.schedule if plan.pp != 1 else "no pp", precision, "compile" if compile_blocks else "no compile"}
    for strategy in plan.distinct:
        dp, fsdp = strategy.has("dp"), strategy.has("fsdp")
        names.add(f"+zero{strategy.zero}" if strategy.zero else _DATA[dp, fsdp])
        names.add(strategy.tensor_flag.partition("@")[0] or ("tp" if strategy.has("tp") else "no tp"))
        names.add({None: "no ckpt", "full": "+ckpt"}.get(strategy.checkpoint, f"+ckpt.{strategy.checkpoint}"))
        names.add("+offload" if strategy.offload else "no offload")
    return names


_DATA = {(False, False): "no dp", (True, False): "dp", (False, True): "fsdp", (True, True): "dp x fsdp"}


if __name__ == "__main__":
    print(page(), end="")
