"""Cases measured on the CPU: plans, their hand-written counterparts, and sizes. Imports no torch."""

from dataclasses import dataclass

from vitpar.models import ViTConfig, model_config
from vitpar.strategy import Plan, parse, validate


@dataclass(frozen=True)
class Size:
    """How much of it.

    rounds: pairs of timed steps, one step of each contender; fewer (at least 5) where they take more than `seconds`.
    memory: whether to measure it.
    """

    model: str
    options: tuple[tuple[str, int], ...]
    batch_size: int
    rounds: int
    seconds: float
    memory: bool

    @property
    def config(self) -> ViTConfig:
        """The model's shape; initial values from which every parameter has a gradient, so that a wrong one shows."""
        return model_config(self.model, init="perturbed", **dict(self.options))

    def plan(self, mesh: str) -> Plan:
        """Return the plan of `mesh`."""
        return validate(parse(mesh), self.config, self.batch_size)


# ViT-Ti/16 with 4 heads instead of 3, which two ranks can share, on images of 112 pixels: 50 tokens.
FULL = Size(
    "vit_tiny_patch16_112", (("num_heads", 4), ("num_classes", 100)), batch_size=32, rounds=24, seconds=25, memory=True
)
QUICK = Size(
    "vit_nano_patch4_16", (("depth", 4), ("num_classes", 10)), batch_size=16, rounds=10, seconds=2, memory=False
)
# So small that what the host does for each operation is nearly all: as on a GPU that computes them at once.
HOST = Size(
    "vit_tiny_patch16_224",
    (("embed_dim", 48), ("num_heads", 3), ("mlp_hidden_dim", 48), ("image_size", 16), ("num_classes", 10)),
    batch_size=1,
    rounds=200,
    seconds=20,
    memory=False,
)


@dataclass(frozen=True)
class Case:
    """A plan and what an engineer would write instead of it.

    target: the step time of vitpar over that of the hand-written loop which we want at most. size: its own, where it
    has one.
    """

    name: str
    mesh: str
    by_hand: str
    target: float
    precision: str = "fp32"
    size: Size | None = None

    @property
    def ranks(self) -> int:
        """Processes."""
        return parse(self.mesh).world_size


CASES = {
    case.name: case
    for case in (
        Case("one", "dp1", "plain PyTorch loop", 1.01),
        Case("dp2", "dp2", "DistributedDataParallel", 1.03),
        Case("fsdp2", "fsdp2", "fully_shard, per block and root", 1.03),
        Case("pp2", "pp2", "PipelineStage + Schedule1F1B, 4 micro-batches", 1.03),
        Case("tp2", "tp2", "parallelize_module", 1.03),
        Case("host", "dp1", "plain loop, bf16 autocast, 1 token", 1.03, "bf16", HOST),
    )
}
