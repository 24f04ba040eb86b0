"""The support matrix: features that a plan combines, and what is refused with its reasons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import product

from vitpar.models.config import ModelConfig
from vitpar.models.families import model_config
from vitpar.models.roles import TABLE
from vitpar.strategy.grammar import parse
from vitpar.strategy.support import CLASHES, DIMENSIONS, Clash
from vitpar.strategy.validate import unsplittable

SMALLEST_TP = {"tp": "tp2", "+sp": "tp2+sp", "+2d": "tp4+2d", "+2.5d": "tp8+2.5d", "+3d": "tp8+3d"}
"""Smallest strategy with each tensor feature."""
MODELS = {
    "ViT": "vit_base_patch16_224",
    "Swin": "swin_base_patch4_window7_224",
    "MAE": "mae_vit_base",
    "BERT": "bert_base",
    "T5": "t5_base",
}
"""A model of each family."""
PREFACE = """<!-- written by `make docs` from src/vitpar/strategy/support.py -->
Each layer chooses one feature of every row below; schedule, precision and compilation apply to the complete plan.
Every combination that is not refused here runs, and its gradients equal those of one process; the tests use the same
table. Degrees must divide what they split, which `vitpar plan` checks for a model and a batch.

""" + "\n".join(f"- **{name}**: {', '.join(f'`{f}`' for f in features)}" for name, features in DIMENSIONS.items())


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
