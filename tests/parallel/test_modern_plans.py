"""Plans of modern Vision Transformers against one process: the loss, every gradient, SGD steps and recipe steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from helpers.modern_vits import PARTS, modern_config
from helpers.parity import check
from helpers.plans import FP64, ZBV, Case, shared_out
from helpers.ranks import RankPool
from vitpar import parse, validate
from vitpar.check import CheckResult
from vitpar.models import ViTConfig
from vitpar.strategy import Plan


@dataclass(frozen=True)
class ModernCase(Case):
    """Plan of a tiny model with the parts of `helpers.modern_vits.PARTS`, with the options of the check."""

    parts: str = ""

    @property
    def config(self) -> ViTConfig:
        """Return the model."""
        return modern_config(self.parts, **self.model)

    @property
    def valid_plan(self) -> Plan:
        """Return the plan, validated for the model."""
        return validate(replace(parse(self.mesh), **self.plan), self.config, self.batch)


def run_modern_case(device: torch.device, case: ModernCase) -> CheckResult:
    """Check one case; runs on every rank."""
    return check(case.config, case.valid_plan, case.batch, device, **case.check)


def case(parts: str, mesh: str, plan: dict[str, Any] | None = None, **options: Any) -> ModernCase:
    return ModernCase(mesh, plan or {}, parts=parts, check={**FP64, "recipe_steps": 0}, **options)


SPLIT = ("tp2", "tp2+sp", "tp4+2d", "tp8+2.5d", "tp8+3d")
"""Every tensor mode."""
CASES = (
    *(case(parts, mesh) for parts in ("dinov3_qkvb", "eva02_clip", "siglip2", "vit5", "vit_22b") for mesh in SPLIT),
    *(case("parallel", mesh) for mesh in ("tp3", "tp2+sp+ckpt", "tp4+2d+ckpt", "tp8+3d+ckpt")),
    case("dinov3_plus", "tp4+sp", {"microbatches": 2}),
    case("fc_norm", "tp2+sp"),
    case("fc_norm", "tp8+3d"),
    case("inner norms", "tp3+sp", batch=12),
    case("rms", "tp4+2d"),
    case("deit3", "pp3", batch=12),
    case("dinov2_giant_reg4", "pp2xtp2xdp2"),
    case("eva02_base", "pp2xtp2xfsdp2"),
    case("siglip", "pp3xdp2", batch=12),
    case("siglip", "tp2xfsdp2+sp+ckpt"),
    case("vit5", "pp2xtp2", ZBV, model={"depth": 4}),
    case("vit_22b", "fsdp2xtp2+sp"),
    case("vit_22b", "dp2+zero2", {"microbatches": 2}),
    case("eva02_tiny", "dp2xfsdp2+ckpt.selective"),
    case("dinov3", "pp2: 0=tp2, *=fsdp2"),
    case("eva02_clip", "pp2: 0=tp2+sp, 1=dp2, head=dp2, *=fsdp2+ckpt"),
    case("siglip2", "pp1: head=tp2, *=dp2"),
    case("siglip2", "pp1: head=tp4+2d, *=tp4+2d", {"microbatches": 2}),
)
QUICK = ("eva02_clip tp2", "vit_22b tp2+sp", "siglip2 tp2", "vit5 tp2+sp", "parallel tp3", "dinov3 pp2: 0=tp2, *=fsdp2")


def words(found: ModernCase) -> str:
    return f"{found.parts} {found}"


SORTED = sorted(CASES, key=lambda found: found.ranks)


@pytest.mark.parametrize(
    "found", shared_out(SORTED, {words(found) for found in CASES if f"{found.parts} {found.mesh}" in QUICK}, words)
)
def test_plan_of_a_modern_model_matches_one_process(found: ModernCase, ranks: Callable[[int], RankPool]) -> None:
    results = ranks(found.ranks).run(run_modern_case, found)
    assert all(result.passed for result in results), results[0].worst
    compared = {comparison.name for comparison in results[0].comparisons}
    parameters = {f"{name}.{key}" for name, layer in found.config.layers.items() for key in layer.parameters}
    assert {f"{what} {name}" for name in parameters for what in ("gradient", "SGD update")} <= compared


def test_table_has_enough_plans() -> None:
    assert len(CASES) >= 40
    assert set(PARTS) - {found.parts for found in CASES} <= {"gap", "dinov2", "siglip_gap"}
