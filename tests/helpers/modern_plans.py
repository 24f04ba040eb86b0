"""Plans of tiny models with the parts of modern Vision Transformers that the tests cover."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from helpers.modern_vits import PARTS, modern_config
from helpers.parity import check
from helpers.plans import FP64, ZBV, Case
from vitpar import parse, validate
from vitpar.check import CheckResult
from vitpar.models import ViTConfig
from vitpar.strategy import Plan


@dataclass(frozen=True)
class ModernCase(Case):
    """Plan of a tiny model with the parts of `helpers.modern_vits.PARTS`, with the options of the check."""

    parts: str = ""
    """Name in PARTS."""
    family: ClassVar[str] = "modern ViT"

    @property
    def config(self) -> ViTConfig:
        """Return the model."""
        return modern_config(self.parts, **self.model)

    @property
    def valid_plan(self) -> Plan:
        """Return the plan, validated for the model."""
        return validate(replace(parse(self.mesh), **self.plan), self.config, self.batch)

    @property
    def features(self) -> frozenset[str]:
        return super().features | {f"model.{key}={value}" for key, value in PARTS[self.parts].items()}

    def __str__(self) -> str:
        return f"{self.parts} {super().__str__()}"


def run_modern_case(device: torch.device, case: ModernCase) -> CheckResult:
    """Check one case; runs on every rank."""
    return check(case.config, case.valid_plan, case.batch, device, **case.check)


def _case(parts: str, mesh: str, plan: dict[str, Any] | None = None, **options: Any) -> ModernCase:
    return ModernCase(mesh, plan or {}, parts=parts, check={**FP64, "recipe_steps": 0}, **options)


SPLIT = ("tp2", "tp2+sp", "tp4+2d", "tp8+2.5d", "tp8+3d")
"""Every tensor mode."""
MODERN_CASES = (
    *(_case(parts, mesh) for parts in ("dinov3_qkvb", "eva02_clip", "siglip2", "vit5", "vit_22b") for mesh in SPLIT),
    *(_case("parallel", mesh) for mesh in ("tp3", "tp2+sp+ckpt", "tp4+2d+ckpt", "tp8+3d+ckpt")),
    _case("dinov3_plus", "tp4+sp", {"microbatches": 2}),
    _case("fc_norm", "tp2+sp"),
    _case("fc_norm", "tp8+3d"),
    _case("inner norms", "tp3+sp", batch=12),
    _case("rms", "tp4+2d"),
    _case("deit3", "pp3", batch=12),
    _case("dinov2_giant_reg4", "pp2xtp2xdp2"),
    _case("eva02_base", "pp2xtp2xfsdp2"),
    _case("siglip_reg", "pp3xdp2", batch=12),
    _case("siglip", "tp2xfsdp2+sp+ckpt"),
    _case("vit5", "pp2xtp2", ZBV, model={"depth": 4}),
    _case("vit_22b", "fsdp2xtp2+sp"),
    _case("vit_22b", "dp2+zero2", {"microbatches": 2}),
    _case("eva02_tiny", "dp2xfsdp2+ckpt.selective"),
    _case("dinov3", "pp2: 0=tp2, *=fsdp2"),
    _case("eva02_clip", "pp2: 0=tp2+sp, 1=dp2, head=dp2, *=fsdp2+ckpt"),
    _case("siglip2", "pp1: head=tp2, *=dp2"),
    _case("siglip_reg", "pp1: head=tp4+2d, *=tp4+2d", {"microbatches": 2}),
)
