"""What is measured on the CPU: the plans, their hand-written counterparts, and the sizes. Imports no torch."""

from dataclasses import dataclass

from vitpar.models import ViTConfig, model_config
from vitpar.strategy import Plan, parse, validate


@dataclass(frozen=True)
class Case:
    """A plan and what an engineer would write instead of it.

    target: the step time of vitpar over that of the hand-written loop which we want at most.
    """

    name: str
    mesh: str
    by_hand: str
    target: float

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
    )
}


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
        """The model's shape."""
        return model_config(self.model, **dict(self.options))

    def plan(self, case: Case) -> Plan:
        """The plan of `case`."""
        return validate(parse(case.mesh), self.config, self.batch_size)


# ViT-Ti/16 with 4 heads instead of 3, which two ranks can share, on images of 112 pixels: 50 tokens.
FULL = Size(
    "vit_tiny_patch16_112", (("heads", 4), ("num_classes", 100)), batch_size=32, rounds=24, seconds=25, memory=True
)
QUICK = Size(
    "vit_nano_patch4_16", (("depth", 4), ("num_classes", 10)), batch_size=16, rounds=10, seconds=2, memory=False
)
