"""Cases measured on the CPU: plans, their hand-written counterparts, and sizes. Imports no torch."""

from dataclasses import dataclass

from vitpar.models import ViTConfig, model_config
from vitpar.strategy import Plan, parse, validate


@dataclass(frozen=True)
class Size:
    """Model, batch and number of timed steps of a case."""

    model: str
    """Name of the model."""
    options: tuple[tuple[str, int], ...]
    """Settings of the model that differ from those of `model`."""
    batch_size: int
    """Global batch size."""
    rounds: int
    """Most pairs of timed steps, one step of each contender."""
    seconds: float
    """Time limit of all pairs: later ones are skipped, but at least 5 are timed."""
    memory: bool
    """Whether to measure memory."""

    @property
    def config(self) -> ViTConfig:
        """Configuration of the model.

        Its initial values are perturbed: zeros would leave some gradients at zero, and hide errors in them.
        """
        return model_config(self.model, init="perturbed", **dict(self.options))

    def plan(self, mesh: str) -> Plan:
        """Return the validated plan of the strategy `mesh`."""
        return validate(parse(mesh), self.config, self.batch_size)


# ViT-Ti/16 on images of 112 pixels (50 tokens), with 4 heads instead of 3 so that two ranks can split them.
FULL = Size(
    "vit_tiny_patch16_112", (("num_heads", 4), ("num_classes", 100)), batch_size=32, rounds=24, seconds=25, memory=True
)
QUICK = Size(
    "vit_nano_patch4_16", (("depth", 4), ("num_classes", 10)), batch_size=16, rounds=10, seconds=2, memory=False
)
# So small that the host's overhead per operation is nearly all of a step, as on a very fast GPU.
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
    """A plan and its hand-written counterpart."""

    name: str
    mesh: str
    """Strategy, for example ``fsdp2``."""
    by_hand: str
    """Description of the hand-written counterpart."""
    target: float
    """Largest acceptable ratio of vitpar's step time to that of the hand-written loop."""
    precision: str = "fp32"
    size: Size | None = None
    """Size to use instead of the one chosen on the command line."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
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
