"""AdamW in one pass: the kernel in Triton's interpreter, and the choice where it is used."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.interpreted import errors_of
from vitpar.errors import RecipeError
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.training.optim import one_pass
from vitpar.training.optim.one_pass import choose_implementation
from vitpar.training.optim.optimizer import ShardedOptimizer

CASES = [
    *(f"kernel torch.{dtype} {averages}" for dtype in ("float32", "bfloat16", "float16") for averages in (False, True)),
    *("torch", "fp32", "bf16", "fp16", "fp16 clipped"),
]


@pytest.fixture(scope="module")
def errors() -> dict[str, str | None]:
    """Return the error of each case by name. All run in one process with Triton's interpreter."""
    return errors_of("one_pass_cases")


@pytest.mark.parametrize("case", CASES)
def test_one_pass_matches_the_formulas_and_torch(case: str, errors: dict[str, str | None]) -> None:
    assert set(errors) == set(CASES)
    assert errors[case] is None, errors[case]


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "precision", "fault", "because"),
    [
        (CPU, "bf16", None, "it does not run on a cpu device"),
        (GPU, "fp64", None, "train.precision fp64 has no float32 parameters"),
        (GPU, "bf16", "Triton is not installed", "Triton is not installed"),
        (GPU, "bf16", None, None),
        (GPU, "fp32", None, None),
    ],
)
def test_one_pass_is_used_where_it_works(
    device: torch.device, precision: str, fault: str | None, because: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "all_gather_json", lambda mine: [None, mine])
    monkeypatch.setattr(one_pass, "_kernel_fault", lambda device: fault)
    chosen = choose_implementation(OptimizerSection(), precision, device)
    assert chosen.name == ("triton" if because is None else "auto")
    assert chosen.because == fault, "only what can be repaired is a warning"
    asked = OptimizerSection(implementation="triton")
    if because is None:
        assert choose_implementation(asked, precision, device).name == "triton"
    else:
        with pytest.raises(RecipeError, match=f"optimizer.implementation is triton, but {because}: use auto"):
            choose_implementation(asked, precision, device)
    for other in (OptimizerSection(name="lamb"), OptimizerSection(implementation="fused")):
        assert choose_implementation(other, precision, device).name == other.implementation


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "find_spec", lambda name: None)
    assert one_pass._kernel_fault(GPU) == "Triton is not installed"


@pytest.mark.parametrize(
    ("parameter", "fits"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(3, 4).double(), False),
        (torch.ones(4, 3).t(), False),
        (torch.ones(3, 4, device="meta"), False),  # as offloaded shards, it is on another device
    ],
)
def test_only_shards_that_fit_are_updated_in_one_pass(
    parameter: torch.Tensor, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "DEVICES", ("cpu",))
    pairs: Any = [("fc.weight", nn.Parameter(torch.ones(2))), ("fc.bias", nn.Parameter(parameter))]
    assert ShardedOptimizer(pairs, OptimizerSection(implementation="triton")).one_pass == fits


def test_choice_of_a_kernel_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SimpleNamespace(fault=lambda device: f"no compiler for {device}")
    monkeypatch.setitem(sys.modules, "vitpar.kernels.adamw", broken)
    monkeypatch.setattr(one_pass, "find_spec", lambda name: name)
    assert one_pass._kernel_fault(GPU) == "no compiler for cuda"
