"""The table of plans that tests, and the support matrix in the docs, go through."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A strategy string, the other fields of its plan, and what the check is told.

    model: options of the tiny ViT (8 blocks, 12 heads). batch: images of a step.
    """

    mesh: str
    plan: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    check: dict[str, Any] = field(default_factory=dict)
    batch: int = 16

    @property
    def ranks(self) -> int:
        """Ranks the plan needs."""
        from vitpar.strategy import parse

        return parse(self.mesh).world_size

    def __str__(self) -> str:
        settings = [f"{k}={v}" for part in (self.plan, self.model, self.check) for k, v in part.items()]
        return " ".join([self.mesh, *settings])


INTERLEAVED = {"schedule": "interleaved1f1b", "virtual_stages": 2}
EVERYTHING = {
    "drop_path": 0.1,
    "dropout": 0.1,
    "qk_norm": True,
    "layer_scale": 0.1,
    "registers": 2,
    "distillation": True,
}

CASES = (
    # every role alone
    Case("dp1"),
    Case("dp1", {"microbatches": 4}),
    Case("dp2"),
    Case("fsdp2"),
    Case("tp2"),
    Case("pp2"),
    Case("dp4", {"microbatches": 2}),
    Case("fsdp4"),
    Case("tp4"),
    Case("pp4"),
    Case("dp8"),
    Case("fsdp8"),
    Case("pp8"),
    # degrees that are no powers of two
    Case("tp3xfsdp2", batch=12),
    Case("tp2xdp3", batch=24),
    Case("pp3xfsdp2", {"split": (2, 3, 3)}, batch=24),
    # pairs, both orders where the order matters
    Case("dp2xfsdp2"),
    Case("fsdp2xdp2"),
    Case("dp2xtp2"),
    Case("tp2xdp2"),
    Case("fsdp2xtp2"),
    Case("tp2xfsdp2"),
    Case("pp2xdp2"),
    Case("pp2xfsdp2"),
    Case("pp2xtp2"),
    Case("tp2xpp2"),
    # triples and all four
    Case("pp2xtp2xdp2"),
    Case("pp2xdp2xtp2"),
    Case("tp2xdp2xpp2"),
    Case("pp2xtp2xfsdp2"),
    Case("dp2xfsdp2xtp2"),
    Case("pp2xdp2xfsdp2"),
    # schedules, micro-batches, stages
    Case("pp2", {"schedule": "gpipe"}),
    Case("pp4xdp2", {"schedule": "gpipe", "microbatches": 8}),
    Case("pp2xtp2", {"schedule": "gpipe"}),
    Case("pp2", INTERLEAVED),
    Case("pp2xtp2xdp2", INTERLEAVED),
    Case("pp2xfsdp2", {**INTERLEAVED, "microbatches": 4}),
    Case("pp2xdp2", {"microbatch_size": 2}),
    Case("pp2", model={"depth": 5}),
    Case("pp2xfsdp2", {"split": "balanced"}, model={"depth": 5}),
    Case("pp2xdp2", {"split": (3, 5)}),
    # checkpointing
    Case("dp1+ckpt"),
    Case("fsdp2xtp2+ckpt"),
    Case("pp2xtp2xdp2+ckpt", model=EVERYTHING),
    Case("dp2xfsdp2+ckpt"),
    Case("pp2+ckpt", INTERLEAVED),
    # the model's options, with classes that tp does not divide
    Case("dp1", model=EVERYTHING),
    Case("tp4xfsdp2", model={**EVERYTHING, "num_classes": 7}),
    Case("pp2xtp2xdp2", model={**EVERYTHING, "num_classes": 7}),
    Case("tp2xdp2", model={"pool": "avg", "position": "sincos2d", "representation_size": 48}),
    # precision
    Case("pp2xtp2xdp2", check={"precision": "fp64"}),
    Case("dp2xfsdp2", check={"precision": "fp64"}),
    Case("pp2xfsdp2", INTERLEAVED, check={"precision": "fp64"}),
    Case("dp1", check={"precision": "bf16"}),
    Case("dp2xfsdp2", check={"precision": "bf16"}),
    Case("pp2xfsdp2", INTERLEAVED, check={"precision": "bf16"}),
    Case("pp2xtp2xdp2", check={"precision": "bf16"}),
    Case("fsdp2xtp2", check={"precision": "bf16"}),
    # the loss
    Case("pp2xtp2xdp2", check={"label_smoothing": 0.1}),
    # optimizers on mixed meshes
    Case("tp2xfsdp2", check={"optimizer": "foreach"}),
    Case("tp2xfsdp2", check={"optimizer": "fused"}),
    Case("pp2xtp2xdp2", check={"optimizer": "for-loop"}),
)
