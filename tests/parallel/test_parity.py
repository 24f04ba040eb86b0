"""Every plan of `helpers.plans` against one process: the loss, every gradient, SGD steps and recipe steps."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.covering_set import tiers
from helpers.parity import run_case, run_compiled, skip_what_cannot_run
from helpers.plans import CASES, Case
from helpers.ranks import RankPool
from vitpar.check import CheckResult
from vitpar.parallel import data as data_parallel
from vitpar.parallel import model as parallel_model
from vitpar.training import step
from vitpar.training.optim.norms import clip_


@pytest.mark.each_row
@pytest.mark.parametrize("case", tiers(CASES))
def test_plan_matches_one_process(case: Case, ranks: Callable[[int], RankPool]) -> None:
    """All ranks must agree on the result, which covers gradients, updates, averages and the gradient norm."""
    skip_what_cannot_run(case.check.get("precision", "fp32"))
    results = ranks(case.ranks).run(run_case, case)
    assert all(result.passed for result in results), results[0].worst
    assert len({str(result) for result in results}) == 1, "ranks disagree about the result"
    names = {comparison.name for comparison in results[0].comparisons}
    for what in ("gradient", "SGD update", "update", "average"):
        assert f"{what} blocks.0.attn.qkv.weight" in names and f"{what} head.fc.bias" in names
    assert {"gradient norm of step 2", "clipped norm of step 2"} <= names


slow, soak = pytest.mark.slow, pytest.mark.soak


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "mesh",
    [
        "tp2+ckpt",
        *(pytest.param(mesh, marks=slow) for mesh in ("dp1", "fsdp2", "pp2")),
        *(pytest.param(mesh, marks=soak) for mesh in ("dp1+ckpt", "dp2", "tp2", "tp2xfsdp2")),
    ],
)
def test_compiled_blocks_match_one_process(mesh: str, ranks: Callable[[int], RankPool]) -> None:
    """All blocks share one graph; a graph per block would exceed the compiler's recompile limit."""
    # More blocks than the compiler's recompile limit (8), after which it silently runs the function eagerly.
    case = Case(mesh, model={"depth": 10, "drop_path": 0.1}, check={"compile_blocks": True})
    for result, graphs in ranks(case.ranks).run(run_compiled, case):
        assert result.passed, result.worst
        assert graphs == 1, "every block must run the same compiled graph"


def test_table_has_enough_plans_and_ranks() -> None:
    assert len({(case.mesh, str(case.plan)) for case in CASES}) >= 24
    assert max(case.ranks for case in CASES) == 8


def spoil_and_run(device: torch.device, case: Case, spoil: str) -> CheckResult:
    """Check one case with deliberately wrong gradients."""
    with pytest.MonkeyPatch.context() as patch:
        spoil_gradients(patch, spoil)
        return run_case(device, case)


def spoil_gradients(patch: pytest.MonkeyPatch, how: str) -> None:
    """Patch gradient reduction.

    how: "averaged" divides by the data-parallel ranks; anything else scales block 0 by 1 / 0.99
    """
    from vitpar.models.vit import layers as vit

    def divisor(module: Any, ranks: int) -> float:
        if how == "averaged":
            return float(ranks)
        return 0.99 if isinstance(module, vit.Block) and module.index == 0 else 1.0

    # The package exports a function of the module's name, which hides the module from a normal import.
    parallelize = importlib.import_module("vitpar.parallel.parallelize")
    real = data_parallel.shard

    def shard(layer: Any, mesh: Any, *settings: Any) -> None:
        real(layer, mesh, *settings)
        layer.set_gradient_divide_factor(divisor(layer, mesh.size()))

    def gradient_sums(layers: Any, *more: Any) -> Any:
        layers = list(layers)
        module_of.update({id(parameter): layer for layer, _ in layers for parameter in layer.parameters()})
        return data_parallel.gradient_sums(layers, *more)

    class Spoilt(data_parallel.GradientSum):
        def wait(self) -> None:
            super().wait()
            for parameter in self._parameters:
                parameter.grad /= divisor(module_of[id(parameter)], self._group.size())

    module_of: dict[int, Any] = {}
    patch.setattr(data_parallel, "GradientSum", Spoilt)
    patch.setattr(parallel_model, "gradient_sums", gradient_sums)
    patch.setattr(parallelize, "shard", shard)


@pytest.mark.parametrize(
    ("spoil", "precision"), [("averaged", "fp32"), ("averaged", "bf16"), ("one block scaled", "fp32")]
)
@pytest.mark.parametrize("mesh", ["dp2", "fsdp2"])
def test_check_detects_a_wrong_gradient_scale(
    mesh: str, spoil: str, precision: str, ranks: Callable[[int], RankPool]
) -> None:
    """The check must fail on averaged instead of summed gradients, and on an error of 1 % in one block."""
    result = ranks(2).run(spoil_and_run, Case(mesh, check={"precision": precision}), spoil)[0]
    assert not result.passed


def clipped_less(device: torch.device, case: Case) -> list[str]:
    """Return what fails if gradients are clipped to 1.2 times the limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "clip_", lambda gradients, norm, limit, scale: clip_(gradients, norm, 1.2 * limit, scale))
        return [comparison.name for comparison in run_case(device, case).comparisons if comparison.severity > 1]


def test_check_detects_a_limit_of_clipping_that_depends_on_the_plan(ranks: Callable[[int], RankPool]) -> None:
    """AdamW updates alike for gradients of any scale."""
    failed = ranks(2).run(clipped_less, Case("pp2", check={"train__clip_grad_norm": 0.1}))[0]
    assert "clipped norm of step 1" in failed
