"""Masked autoencoders under plans: loss, gradients and steps equal those of one process."""

from collections.abc import Callable
from typing import Any

import pytest

from helpers.mae_models import check_mae, check_mistake
from helpers.plans import ZBV
from helpers.ranks import RankPool
from vitpar import parse

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dp1", {"microbatches": 2}, {}),
    ("tp2", {}, {}),
    ("tp2xdp2+sp", {"microbatches": 2}, {}),
    ("fsdp2", {}, {"task__options": {"norm_pix_loss": False}}),
    ("pp2", ZBV, {}),
    ("pp2xtp2", {"schedule": "1f1b", "microbatches": 2}, {}),
    ("pp1: 0-1=tp2, *=fsdp2", {}, {}),
    ("tp4+2d", {}, {}),
    ("tp8+3d", {}, {}),
]


@pytest.mark.parametrize(("mesh", "plan", "settings"), CASES, ids=[mesh for mesh, *_ in CASES])
def test_plan_matches_one_process(
    mesh: str, plan: dict[str, Any], settings: dict[str, Any], ranks: Callable[[int], RankPool]
) -> None:
    results = ranks(parse(mesh).world_size).run(check_mae, mesh, plan, **settings)
    assert all(result.passed for result in results), str(results[0])
    assert len({str(result) for result in results}) == 1, "ranks disagree about the result"


@pytest.mark.parametrize("mesh", ["tp2+sp", "pp2"])
def test_check_finds_targets_of_other_keys_and_of_other_rows(mesh: str, ranks: Callable[[int], RankPool]) -> None:
    for mistake in ("keys", "rows"):
        assert not ranks(2).run(check_mistake, mesh, mistake)[0].passed, mistake
