"""Layerwise plans against one process: drawn at random from the grammar, and the kinds that Galvatron finds."""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from helpers.parity import check, run_case
from helpers.plans import Case, layerwise
from helpers.ranks import RankPool
from vitpar import model_config, parse, validate
from vitpar.check import CheckResult
from vitpar.errors import StrategyError
from vitpar.strategy.support import refuse_clashes

DEPTH, BATCH = 6, 48
MODEL = {"depth": DEPTH, "drop_path": 0.1, "layer_scale": 0.1, "qk_norm": True, "dropout": 0.1}
# 0: a few fixed examples; N > 0: N examples that differ in every run.
EXAMPLES = int(os.environ.get("VITPAR_RANDOM_PLANS", "0"))


def runs(case: Case) -> bool:
    """Return whether vitpar accepts the plan."""
    try:
        config = model_config("vit_nano_patch4_16", **case.model)
        refuse_clashes(validate(replace(parse(case.mesh), **case.plan), config, case.batch), "fp64", False)
    except StrategyError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(0 if EXAMPLES else 900)
def test_random_plans_match_one_process(ranks: Callable[[int], RankPool]) -> None:
    checked: set[str] = set()

    @settings(
        max_examples=EXAMPLES or 6,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from([4, 6] if not EXAMPLES else [2, 4, 6, 8]).flatmap(lambda ranks: layerwise(ranks, DEPTH)))
    def check(case: Case) -> None:
        case = replace(case, model=MODEL, batch=BATCH, check={"precision": "fp64"})
        assume(runs(case))
        checked.add(str(case))
        results = ranks(case.ranks).run(run_case, case)
        assert all(result.passed for result in results), (str(case), results[0].worst)

    check()
    assert len(checked) >= 5, checked
    assert any("pp2" in plan or "pp3" in plan for plan in checked)


def check_deep(device: torch.device, mesh: str) -> CheckResult:
    """Check a plan of 8 ranks on a narrow ViT with 32 blocks, as many as ViT-H has; runs on every rank."""
    config = model_config("vit_custom", patch_size=4, image_size=8, embed_dim=16, depth=32, num_heads=2, num_classes=5)
    plan = validate(parse(mesh), config, 16)
    return check(config, plan, 16, device, precision="fp64")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["pp1: 0-19=dp8, 20-31=fsdp8", "pp1: 0-1=dp8, 2-31=fsdp8", "pp1: 0=tp2xdp4, 1-31=tp2xfsdp4"]
)
def test_plans_like_galvatrons_match_one_process(mesh: str, ranks: Callable[[int], RankPool]) -> None:
    result = ranks(8).run(check_deep, mesh)[0]
    assert result.passed, result.worst
    assert len(result.quantities["gradient"]) > 32 * 12
