"""Layerwise plans against one process, drawn at random from the grammar."""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from helpers.parity import run_case
from helpers.plans import Case, layerwise
from helpers.ranks import RankPool
from vitpar import model_config, parse, validate
from vitpar.errors import StrategyError
from vitpar.strategy.support import refuse_clashes

DEPTH, BATCH = 4, 48
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
        max_examples=EXAMPLES or 4, derandomize=not EXAMPLES, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.sampled_from([4, 6] if not EXAMPLES else [2, 4, 6, 8]).flatmap(lambda ranks: layerwise(ranks, DEPTH)))
    def check(case: Case) -> None:
        case = replace(case, model=MODEL, batch=BATCH, check={"precision": "fp64"})
        assume(runs(case))
        checked.add(str(case))
        results = ranks(case.ranks).run(run_case, case)
        assert all(result.passed for result in results), (str(case), results[0].worst)

    check()
    assert len(checked) >= 3, checked
    assert any("pp2" in plan or "pp3" in plan for plan in checked)
