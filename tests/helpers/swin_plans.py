"""Plans of a tiny Swin Transformer that the tests cover."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from helpers.parity import check
from helpers.plans import DUALPIPEV, FP64, INTERLEAVED, ZBV, ZERO_BUBBLE, Case
from helpers.support_matrix import smallest_plan
from vitpar import model_config, parse, validate
from vitpar.check import CheckResult
from vitpar.models.config import ModelConfig
from vitpar.parallel import Communication
from vitpar.strategy import Plan

TINY: Mapping[str, Any] = {
    "patch_size": 2,
    "image_size": 16,  # grids of 8, 4 and 2 tokens: windows are shifted in the first two stages
    "window_size": 2,
    "embed_dim": 24,
    "depths": (2, 2, 2),
    "num_heads": (12, 12, 24),
    "mlp_ratio": 2.0,
    "num_classes": 5,
    "drop_path": 0.1,
}
"""Options of the tiny Swin Transformer. Degrees of 2, 3 and 4 divide the numbers of every stage."""
DEEP = {"depths": (3, 2, 3)}
"""Depths for plans with eight stages."""
UNEVEN = {"num_heads": (3, 6, 12), "embed_dim": 12}
"""Heads of which 3 are in the first stage, as swin_tiny has: tp2 fits from the second stage on."""

SGD = {"optimizer__name": "sgd"}
"""Adam moves an element by the sign of its gradient, and a tiny norm has elements whose gradient is only rounding."""


@dataclass(frozen=True)
class SwinCase(Case):
    """Plan of the tiny Swin Transformer, with the options of the check."""

    family: ClassVar[str] = "Swin"

    @property
    def sizes(self) -> dict[str, Any]:
        return {**TINY, **self.model}

    @property
    def config(self) -> ModelConfig:
        """Return the model."""
        return model_config("swin_custom", **self.sizes)

    @property
    def valid_plan(self) -> Plan:
        """Return the plan, validated for the model."""
        return validate(replace(parse(self.mesh), **self.plan), self.config, self.batch)

    def __str__(self) -> str:
        return f"swin {super().__str__()}"


def run_swin_case(device: torch.device, case: SwinCase) -> CheckResult:
    """Check one case; runs on every rank."""
    return check(case.config, case.valid_plan, case.batch, device, **case.check)


SWIN_CASES = (
    # every role alone, pairs, triples
    SwinCase("dp1", {"microbatches": 4}, check=FP64),
    SwinCase("dp2"),
    SwinCase("fsdp2"),
    SwinCase("tp2", check=FP64),
    SwinCase("pp2", check=FP64),
    SwinCase("tp4"),
    SwinCase("pp4", model=DEEP),
    SwinCase("tp3xfsdp2", batch=12),
    SwinCase("dp2xfsdp2", check=FP64),
    SwinCase("tp2xdp2"),
    SwinCase("fsdp2xtp2"),
    SwinCase("pp2xdp2"),
    SwinCase("pp2xfsdp2", check=FP64),
    SwinCase("tp2xpp2"),
    SwinCase("pp2xtp2xdp2", check=FP64),
    SwinCase("pp2xtp2xfsdp2"),
    SwinCase("pp2xdp2xfsdp2"),
    # tensor modes
    SwinCase("tp2+sp", check=FP64),
    SwinCase("tp4+sp", {"microbatches": 2}),
    SwinCase("tp2xfsdp2+sp", check=FP64),
    SwinCase("pp2xtp2+sp"),
    SwinCase("tp4+2d", check=FP64),
    SwinCase("tp4+2d", {"microbatches": 2}, model={"drop_path": 0.4}),
    SwinCase("dp2xtp4+2d"),
    SwinCase("pp2xtp4+2d", check=FP64),
    SwinCase("tp8+2.5d", check=FP64),
    SwinCase("tp8+2.5d+ckpt", {"microbatches": 2}),
    SwinCase("tp8+3d", check=FP64),
    SwinCase("tp8+3d", {"microbatches": 2}),
    SwinCase("tp9+2d", batch=36, check={**FP64, "recipe_steps": 0, "sgd_steps": 1}),
    # schedules
    SwinCase("pp2", {"schedule": "gpipe"}),
    SwinCase("pp3", {"schedule": "gpipe"}, batch=12, check=FP64),
    SwinCase("pp2", INTERLEAVED, check=FP64),
    SwinCase("pp2xtp2", INTERLEAVED),
    SwinCase("pp2", ZERO_BUBBLE, check=FP64),
    SwinCase("pp2xfsdp2", ZERO_BUBBLE),
    SwinCase("pp2", ZBV, check=FP64),
    SwinCase("pp4", ZBV, model=DEEP),
    SwinCase("pp2xtp2", ZBV, model={"drop_path": 0.3}, check=FP64),
    SwinCase("pp2", DUALPIPEV, check=FP64),
    SwinCase("pp3xdp2", DUALPIPEV, model={"depths": (1, 2, 3)}, batch=24),
    SwinCase("pp2xtp4+2d", ZBV, check=FP64),
    SwinCase("pp2xdp2", {"microbatch_size": 2}),
    # stages of any size
    SwinCase("pp2", {"split": (1, 5)}, check=FP64),
    SwinCase("pp2xdp2", {"split": (5, 1)}),
    SwinCase("pp2xtp2", {"split": "balanced"}, model={"depths": (1, 2, 4)}, check=FP64),
    SwinCase("pp2", {**INTERLEAVED, "split": (1, 2, 1, 2)}),
    SwinCase("pp3", {"split": (3, 1, 2)}, batch=12),
    SwinCase("pp2", {**ZBV, "split": (2, 1, 2, 1)}, check=FP64),
    # zero1, zero2, checkpointing, offload
    SwinCase("dp4+zero1", {"microbatches": 2}),
    SwinCase("dp4+zero2", {"microbatches": 2}),
    SwinCase("dp2xtp2+zero2", check=FP64),
    SwinCase("pp2xdp2+zero1", ZBV, check=FP64),
    SwinCase("pp2xdp2+zero2"),
    SwinCase("tp4xdp2+2d+zero1"),
    SwinCase("dp2+ckpt", check=FP64),
    SwinCase("tp2xfsdp2+sp+ckpt"),
    SwinCase("pp2xtp2+ckpt", INTERLEAVED, check=FP64),
    SwinCase("dp2+ckpt.selective", check=FP64),
    SwinCase("tp2xfsdp2+ckpt.selective"),
    SwinCase("tp4+2d+ckpt.selective", check=FP64),
    SwinCase("pp2xtp2+sp+ckpt.selective"),
    SwinCase("tp8+3d+ckpt", check=FP64),
    SwinCase("fsdp2+offload"),
    # precision
    SwinCase("dp1", check={"precision": "bf16", **SGD}),
    SwinCase("pp2xtp2xdp2", check={"precision": "bf16", **SGD}),
    SwinCase("dp2xfsdp2", check={"precision": "bf16", **SGD}),
    SwinCase("tp4+2d", check={"precision": "bf16", **SGD}),
    SwinCase("tp8+3d", check={"precision": "bf16", **SGD}),
    SwinCase("tp2xfsdp2+sp", check={"precision": "fp16"}),
    # layer by layer: names, numbers and both
    SwinCase("pp1: stage1=dp2, *=tp2", model=UNEVEN, check=FP64),
    SwinCase("pp1: stage1=fsdp4, *=tp2xfsdp2", model=UNEVEN),
    SwinCase("pp2: stage1=dp2, stage2=tp2+sp, *=fsdp2", check=FP64),
    SwinCase("pp1: stage1=tp4+2d, stage2=dp4, stage3=tp4+sp, *=fsdp4", check=FP64),
    SwinCase("pp1: embed=dp4, 0=tp2xdp2, 1=fsdp4, stage2=tp4, *=dp4+zero2", check=FP64),
    SwinCase("pp1: 0-2=dp4, 3-5=tp4"),
    SwinCase("pp2: 0-1=dp2+ckpt, stage3=fsdp2, *=tp2", {"split": (3, 3)}, check=FP64),
    SwinCase("pp2: stage1=tp2, stage3=tp2+sp, *=dp2+zero1", INTERLEAVED, check=FP64),
    SwinCase("pp2: stage2=dp2, *=tp2", ZBV, check=FP64),
    SwinCase("pp2: stage1=dp2, head=tp2, *=fsdp2", DUALPIPEV),
    SwinCase("pp1: stage1=tp8+3d, stage2=tp8+2.5d, *=dp2xtp4+2d", check=FP64),
    SwinCase("pp2: stage1=dp4, stage2=tp4+2d, *=tp2xfsdp2+ckpt", {"schedule": "gpipe"}, check=FP64),
    # timing of the communication
    SwinCase("fsdp2", {"microbatches": 2}, check={"communication": Communication(prefetch=2)}),
    SwinCase("pp2xfsdp2", check={"communication": Communication(reduce_every_microbatch=True)}),
)


def swin_of_features(*choice: str) -> SwinCase:
    """Return the smallest plan with these features, one of each dimension of `STRUCTURE` and a precision."""
    *chosen, precision = choice
    mesh, plan = smallest_plan(*chosen)
    # float8 needs shards whose sizes are multiples of 16
    model = {"embed_dim": 64, "num_heads": (4, 4, 8)} if precision == "fp8" else {"embed_dim": 48}
    return SwinCase(mesh, plan, model, {"precision": precision, **SGD}, batch=16 * parse(mesh).data_parallel)
