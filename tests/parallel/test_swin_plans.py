"""Plans of a Swin Transformer against one process: the loss, every gradient, SGD steps and recipe steps."""

from collections.abc import Callable

import pytest

from helpers.covering_set import tiers
from helpers.parity import skip_what_cannot_run
from helpers.ranks import RankPool
from helpers.support_matrix import covering, ranks_of
from helpers.swin_plans import SWIN_CASES, SwinCase, run_swin_case, swin_of_features


def check_case(case: SwinCase, ranks: Callable[[int], RankPool]) -> None:
    """Check a plan. All ranks must agree on the result, which has the gradient of every parameter."""
    skip_what_cannot_run(case.check.get("precision", "fp32"))
    results = ranks(case.ranks).run(run_swin_case, case)
    assert all(result.passed for result in results), results[0].worst
    assert len({str(result) for result in results}) == 1, "ranks disagree about the result"
    compared = {comparison.name for comparison in results[0].comparisons}
    parameters = {f"{name}.{key}" for name, layer in case.config.layers.items() for key in layer.parameters}
    for what in ("gradient", "SGD update", *(("update", "average") if case.check.get("recipe_steps") != 0 else ())):
        assert {f"{what} {name}" for name in parameters} <= compared


@pytest.mark.parametrize("case", tiers(SWIN_CASES))
def test_plan_of_swin_matches_one_process(case: SwinCase, ranks: Callable[[int], RankPool]) -> None:
    check_case(case, ranks)


def test_table_has_enough_plans_of_swin() -> None:
    assert len({(case.mesh, str(case.plan)) for case in SWIN_CASES}) >= 60
    assert any(not strategy.has("tp") for case in SWIN_CASES for strategy in case.valid_plan.distinct)


@pytest.mark.soak
@pytest.mark.parametrize("choice", covering(), ids=" ".join)
def test_every_pair_of_features_of_swin_matches_one_process(
    choice: tuple[str, ...], ranks: Callable[[int], RankPool]
) -> None:
    assert ranks_of(choice) <= 8
    check_case(swin_of_features(*choice), ranks)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_compiled_blocks_of_swin_match_one_process(ranks: Callable[[int], RankPool]) -> None:
    case = SwinCase("tp2+ckpt", check={"compile_blocks": True})
    check_case(case, ranks)
