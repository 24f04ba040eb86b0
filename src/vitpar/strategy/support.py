"""Support matrix: features of a plan, pairs of features that clash, and settings without effect.

Refusals, the page ``docs/support.md`` (`page`) and the combinations of the tests (`combinations`) follow from this one
table. Every plan without a clash runs, with the same gradients as a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Generic, TypeVar

from vitpar.errors import StrategyError, UserError
from vitpar.models.config import ModelConfig
from vitpar.models.families import model_config
from vitpar.models.roles import TABLE
from vitpar.strategy.execution import Rules
from vitpar.strategy.grammar import parse
from vitpar.strategy.layer import Strategy
from vitpar.strategy.layout import sharding_axes, shards_as_fsdp
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


CLASHES = (
    *(
        Clash(
            schedule,
            "compile",
            "input and weight gradients are computed separately, which a compiled block cannot do (pytorch#161904)",
            "leave out compile, or use schedule 1f1b or interleaved1f1b",
        )
        for schedule in SPLIT_BACKWARD
    ),
    *(
        Clash(
            schedule,
            checkpoint,
            "the split backward keeps in between what checkpointing would free (pytorch#136766)",
            f"leave out {checkpoint}, or use schedule 1f1b or interleaved1f1b",
        )
        for schedule in SPLIT_BACKWARD
        for checkpoint in ("+ckpt", "+ckpt.selective")
    ),
    *(
        Clash(
            schedule,
            "+zero2",
            APART,
            "use +zero1, or schedule 1f1b or interleaved1f1b",
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


Case = TypeVar("Case")


@dataclass(frozen=True)
class Effect(Generic[Case]):
    """Settings that only have an effect in some cases."""

    keys: tuple[str, ...]
    """Dotted keys of a recipe."""
    used: Callable[[Case], bool]
    """Function of a case (a recipe, or a plan in a precision): whether the settings have an effect."""
    refusal: str
    """Message if one is set without effect, with the fields ``{key}``, ``{value}`` and ``{case}``."""


def idle_settings(effects: Iterable[Effect[Case]], case: Case) -> set[str]:
    """Return the keys of the settings that have no effect in `case`."""
    return {key for effect in effects if not effect.used(case) for key in effect.keys}


def refuse_idle(
    effects: Iterable[Effect[Case]], case: Case, given: Mapping[str, object], error: type[UserError]
) -> None:
    """Raise `error` if one of the settings `given`, by key, has no effect in `case`."""
    for effect in effects:
        wrong = [] if effect.used(case) else [key for key in effect.keys if key in given]
        if wrong:
            raise error(effect.refusal.format(key=wrong[0], value=given[wrong[0]], case=case))


@dataclass(frozen=True)
class PlanInPrecision:
    """A plan and a precision, which decide whether communication settings have an effect."""

    plan: Plan
    """The plan."""
    precision: str
    """Name of the precision."""

    def __str__(self) -> str:
        return f"'{shown(self.plan)}' in {self.precision}"


def _communication(names: str, needs: str, test: Callable[[Strategy, Rules], bool]) -> Effect[PlanInPrecision]:
    """Return the effect of settings of `Communication`.

    names: fields of `Communication`, separated by spaces
    needs: description of the layers that use them, for messages
    test: function of a strategy and the plan's rules: whether such layers use them
    """

    def used(case: PlanInPrecision) -> bool:
        rules = Rules.under(case.plan, case.precision)
        return any(test(strategy, rules) for strategy in case.plan.distinct)

    refusal = f"{{key}} is {{value}}, which does nothing with {{case}}: leave it out, it is for {needs}"
    return Effect(tuple(f"communication.{name}" for name in names.split()), used, refusal)


COMMUNICATION = (
    _communication(
        "bucket_cap_mb",
        f"dp where nothing is sharded or offloaded, and in 16 bits not with {', '.join(SPLIT_BACKWARD)}",
        lambda s, rules: s.has("dp") and not rules.wraps(s),
    ),
    _communication("prefetch", "fsdp, +2d, +2.5d, +3d, +zero1 and +zero2", lambda s, _: bool(sharding_axes(s))),
    _communication(
        "reshard_after_forward reduce_every_microbatch",
        "fsdp, +2d, +2.5d and +3d",
        lambda s, _: shards_as_fsdp(s),
    ),
)
"""Effects of the communication settings; ``vitpar.training.recipe.effects`` has those of the other settings."""


def refuse_unused(plan: Plan, precision: str, communication: Mapping[str, object]) -> None:
    """Raise StrategyError if one of the recipe's `communication` settings has no effect or clashes with the schedule.

    communication: values by field of `Communication`; None for settings that are not given
    """
    if communication["reduce_every_microbatch"] and plan.splits_backward:
        raise StrategyError(
            f"communication.reduce_every_microbatch clashes with {plan.schedule} in '{shown(plan)}', as {APART}: "
            "leave it out, or use schedule 1f1b or interleaved1f1b"
        )
    given = {f"communication.{name}": value for name, value in communication.items() if value is not None}
    refuse_idle(COMMUNICATION, PlanInPrecision(plan, precision), given, StrategyError)


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
