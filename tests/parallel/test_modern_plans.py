"""Plans of modern Vision Transformers against one process: the loss, every gradient, SGD steps and recipe steps."""

from collections.abc import Callable

import pytest

from helpers.covering_set import tiers
from helpers.modern_plans import MODERN_CASES, ModernCase, run_modern_case
from helpers.modern_vits import PARTS
from helpers.ranks import RankPool


@pytest.mark.parametrize("found", tiers(MODERN_CASES))
def test_plan_of_a_modern_model_matches_one_process(found: ModernCase, ranks: Callable[[int], RankPool]) -> None:
    results = ranks(found.ranks).run(run_modern_case, found)
    assert all(result.passed for result in results), results[0].worst
    compared = {comparison.name for comparison in results[0].comparisons}
    parameters = {f"{name}.{key}" for name, layer in found.config.layers.items() for key in layer.parameters}
    assert {f"{what} {name}" for name in parameters for what in ("gradient", "SGD update")} <= compared


def test_table_has_enough_plans() -> None:
    assert len(MODERN_CASES) >= 40
    assert set(PARTS) - {found.parts for found in MODERN_CASES} <= {"gap", "dinov2", "siglip_gap"}
