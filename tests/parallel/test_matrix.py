"""Support matrix: its refusals, its page in docs, and every allowed combination against one process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations as pairs_of
from typing import Any

import pytest
import torch

from helpers.parity import TASKS, parts_of, run_case, skip_what_cannot_run
from helpers.plans import SGD, Case
from helpers.ranks import Ranks
from pages.support import MODELS, combinations, page, splits
from vitpar import Plan, model_config, parse, validate
from vitpar.check import CheckResult
from vitpar.errors import StrategyError
from vitpar.strategy.support import CLASHES, DIMENSIONS, Clash, features, refuse_apart, refuse_clashes

STRUCTURE = ("data", "tensor", "schedule", "checkpoint")
"""Dimensions of the support matrix that decide the plan."""
_DATA = {"no dp": "", "dp": "dp2", "+zero1": "dp2", "+zero2": "dp2", "fsdp": "fsdp2", "dp x fsdp": "dp2xfsdp2"}
_TENSOR = {"no tp": "", "tp": "tp2", "+sp": "tp2", "+2d": "tp4", "+2.5d": "tp8", "+3d": "tp8"}


def smallest_plan(data: str, tensor: str, schedule: str, checkpoint: str) -> tuple[str, dict[str, Any]]:
    """Return the mesh and the other fields of the smallest plan that has these features."""
    axes = ["" if schedule == "no pp" else "pp2", _DATA[data], _TENSOR[tensor]]
    flags = [feature for feature in (tensor, data, checkpoint) if feature.startswith("+")]
    fields: dict[str, Any] = {"microbatches": 2}
    if schedule != "no pp":
        fields = {"schedule": schedule, "microbatches": 4}
    if schedule not in ("no pp", "gpipe", "1f1b"):
        fields["virtual_stages"] = 2
    mesh = "x".join(filter(None, axes)) or "dp1"
    return mesh + "".join(flags), fields


def ranks_of(choice: tuple[str, ...]) -> int:
    """Return the ranks of the smallest plan with these features; a precision is ignored."""
    return parse(smallest_plan(*choice[: len(STRUCTURE)])[0]).world_size


def covering(
    keep: Callable[[tuple[str, ...]], bool] = lambda choice: True, most: int | None = None
) -> list[tuple[str, ...]]:
    """Return few combinations of at most 8 ranks that contain every possible pair of features.

    The choice is greedy: the combination with the most new pairs comes next.

    keep: whether a combination may be chosen
    most: number of combinations after which to stop, although pairs are missing; None for no limit
    """
    choices = [choice for choice in combinations((*STRUCTURE, "precision")) if ranks_of(choice) <= 8 and keep(choice)]
    missing = {pair for choice in choices for pair in pairs_of(choice, 2)}
    found = []
    while missing and len(found) != most:
        best = max(choices, key=lambda choice: len(missing.intersection(pairs_of(choice, 2))))
        missing.difference_update(pairs_of(best, 2))
        found.append(best)
    return sorted(found, key=ranks_of)


BLOCKS = {"embed_dim": 64, "num_heads": 4, "mlp_hidden_dim": 128}
"""Sizes of blocks. float8 needs shards whose sizes are multiples of 16."""
SMALL = {"embed_dim": 24, "num_heads": 4, "mlp_hidden_dim": 48}
DECODER = {f"decoder_{name}": size for name, size in BLOCKS.items()} | {"decoder_depth": 2}
SIZES: dict[str, dict[str, Any]] = {
    "ViT": {"image_size": 8, "num_classes": 5, "qk_norm": True},
    "Swin": {"embed_dim": 48},
    "MAE": {**BLOCKS, "options": DECODER},
    "BERT": BLOCKS,
    "T5": {**BLOCKS, "head_dim": 16, "decoder_depth": 2},
}
"""Options of the model of each family."""


def case_of(choice: Sequence[str], family: str = "ViT") -> Case:
    """Return the smallest plan that has these features, one of each dimension of STRUCTURE and perhaps a precision.

    In bf16 the recipe has SGD: AdamW moves an element by the sign of its gradient, which near zero is only rounding.
    Plans with more than 8 ranks take one step instead of four, so that the test ends within a day.
    """
    mesh, plan = smallest_plan(*choice[: len(STRUCTURE)])
    precision = choice[-1] if len(choice) > len(STRUCTURE) else "fp32"
    model, check = SIZES[family], {"precision": precision}
    if family == "ViT":
        model = {**model, "depth": 4 if "virtual_stages" in plan else 2, **(BLOCKS if precision == "fp8" else SMALL)}
    if family == "Swin" and precision == "fp8":
        model = {"embed_dim": 64, "num_heads": (4, 4, 8)}
    if family != "ViT" or precision == "bf16":
        check |= SGD
    steps = {}
    if family in TASKS:
        steps = {"sgd_steps": 1, "recipe_steps": 1}
    elif parse(mesh).world_size > 8:
        steps = {"sgd_steps": 1, "recipe_steps": 0}
    return Case(mesh, plan, model, {**check, **steps}, 16 * parse(mesh).data_parallel, family)


def plan_of(case: Case) -> Plan:
    return parts_of(case)[2]


def run_cases(device: torch.device, cases: Sequence[Case]) -> list[CheckResult]:
    """Check cases of one mesh; runs on every rank."""
    return [run_case(device, case) for case in cases]


def test_every_allowed_combination_gives_a_valid_plan() -> None:
    for choice in combinations(STRUCTURE):
        plan = plan_of(case_of(choice))
        for precision in DIMENSIONS["precision"]:
            refuse_clashes(plan, precision, False)
        assert features(plan, "fp32", False) == {*choice, "fp32", "no compile", "no offload"}, choice


def pairs_of_features(family: str) -> Iterator[Any]:
    """Yield parameters of the next test: for ViT all, for other tasks 12 slow plans, and else only in soak."""
    config = parts_of(case_of(("no dp", "no tp", "no pp", "no ckpt"), family))[1]
    able = {tensor for tensor in DIMENSIONS["tensor"] if splits(config, tensor)}
    every = covering(lambda choice: choice[1] in able)
    few = covering(lambda choice: choice[1] in able and ranks_of(choice) <= 4, most=12) if family in TASKS else []
    assert len(every) >= 40
    for choice in dict.fromkeys([*few, *every]):
        marks = [pytest.mark.slow] * (choice in few) + [pytest.mark.soak] * (choice in every)
        if family == "ViT":
            marks = [pytest.mark.slow] * (ranks_of(choice) > 4)
        yield pytest.param(family, choice, marks=marks, id=f"{family} {' '.join(choice)}")


@pytest.mark.parametrize(("family", "choice"), [case for family in SIZES for case in pairs_of_features(family)])
def test_every_pair_of_features_matches_one_process(family: str, choice: tuple[str, ...], ranks: Ranks) -> None:
    """Few combinations contain all possible pairs; `make soak` checks the complete product for ViT."""
    skip_what_cannot_run(choice[-1])
    results = ranks(ranks_of(choice)).run(run_case, case_of(choice, family))
    assert all(result.passed for result in results), results[0].worst
    assert len({str(result) for result in results}) == 1, "ranks disagree about the result"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("choice", sorted(combinations(STRUCTURE), key=ranks_of), ids=" ".join)
def test_every_allowed_combination_matches_one_process(choice: tuple[str, ...], ranks: Ranks) -> None:
    cases = [case_of((*choice, precision)) for precision in DIMENSIONS["precision"]]
    for result in ranks(ranks_of(choice)).run(run_cases, cases)[0]:
        assert result.passed, (result.precision, result.worst)


@pytest.mark.parametrize("clash", CLASHES, ids=lambda clash: f"{clash.first} {clash.second}")
def test_every_clash_is_refused_with_its_reason(clash: Clash) -> None:
    """The error names both features, the reason, and what to use instead."""
    chosen = {clash.first, clash.second}
    schedule = next(iter(chosen & set(DIMENSIONS["schedule"])), "1f1b")
    data = next(iter(chosen & set(DIMENSIONS["data"])), "dp")
    checkpoint = next(iter(chosen & set(DIMENSIONS["checkpoint"])), "no ckpt")
    plan = plan_of(case_of((data, "tp", schedule, checkpoint)))
    with pytest.raises(StrategyError) as caught:
        refuse_clashes(plan, "fp32", "compile" in chosen)
    assert str(caught.value).startswith(f"{clash.first} clashes with {clash.second} in '{plan}', as ")
    assert str(caught.value).endswith(f": {clash.instead}")


def test_reducing_every_microbatch_needs_unsplit_backwards() -> None:
    plan = replace(parse("pp2xfsdp2"), virtual_stages=2)
    refuse_apart(replace(plan, schedule="interleaved1f1b"), True)
    refuse_apart(replace(parse("pp2xdp2"), virtual_stages=2, schedule="zbvzerobubble"), True)
    with pytest.raises(StrategyError, match=r"^communication.reduce_every_microbatch clashes with zbvzerobubble in '"):
        refuse_apart(replace(plan, schedule="zbvzerobubble"), True)


@pytest.mark.parametrize("family", MODELS)
def test_a_plan_of_a_model_is_refused_where_the_page_says_so(family: str) -> None:
    config = model_config(MODELS[family])
    row = next(line for line in page().splitlines() if line.startswith(f"| {family} |"))
    for tensor, cell in zip(DIMENSIONS["tensor"], row.split(" | ")[1:], strict=True):
        plan = parse(smallest_plan("no dp", tensor, "no pp", "no ckpt")[0])
        if cell.startswith("refused"):
            with pytest.raises(StrategyError, match=r"whose parts only tp and .sp can split: leave .* out$"):
                validate(plan, config, 16)
        else:
            validate(plan, config, 16)
