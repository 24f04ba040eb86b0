"""Roofline estimate of a training step on a GPU, from the recorded work of a block and the rates of a data sheet.

| part of a step                          | estimated by                                                      |
|-----------------------------------------|-------------------------------------------------------------------|
| products of blocks                      | FLOPs at the sustained rate, and the largest operand moved once   |
| attention                               | FLOPs in full tiles at ``Kernels.attention`` of that rate         |
| other kernels of blocks                 | recorded bytes at the sustained rate of memory                    |
| gaps between kernels                    | ``Kernels.gap`` for each                                          |
| optimizer, norm, clipping               | ``execution.update_bytes`` of one pass on one GPU                 |
| embed, head                             | the planner's estimate                                            |

Rates and constants are the planner's (``vitpar.planner.profile``, ``vitpar.clusters``). The host is assumed
never to delay the GPU.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

from bench.dry.work import BlockWork, Launch
from vitpar.models import ViTConfig
from vitpar.models.description import AttentionShape
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model, tiled_flops
from vitpar.planner.profile.profiles import Hardware, ModelProfile
from vitpar.strategy.execution import update_bytes


@dataclass(frozen=True)
class Seconds:
    """Estimated seconds of a step by kind of work, on one GPU."""

    products: float
    """Matrix products of all blocks."""
    attention: float
    """Attention of all blocks."""
    memory: float
    """Other kernels of all blocks."""
    gaps: float
    """Time between two kernels, in all blocks."""
    ends: float
    """Layers embed and head, and the host's work around them."""
    update: float
    """Optimizer, norm, clipping and 16-bit copies of parameters."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(astuple(self))


@dataclass(frozen=True)
class Estimate:
    """Estimate of a training step on one GPU."""

    seconds: Seconds
    """Estimated seconds by kind of work."""
    planner: float
    """Seconds of a step by the planner's formulas, which count a block's bytes from its shapes."""
    flops: int
    """FLOPs of a step, matrix products only."""
    peak: float
    """Peak FLOP/s of bf16 products."""

    def mfu(self, seconds: float) -> float:
        """Return the share of the peak, from 0 to 1, of a step that takes `seconds`."""
        return self.flops / (seconds * self.peak)

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as JSON, with the step and MFU that follow."""
        step = self.seconds.step
        return asdict(self) | {"step": step, "mfu": self.mfu(step), "planner_mfu": self.mfu(self.planner)}


def rates_of(gpu: str, products: float | None = None) -> Hardware:
    """Return the rates of one GPU by the name of its data sheet.

    products: sustained FLOP/s of bf16 products to assume instead; other data types change in proportion.
    """
    rates = find_cluster(f"1x{gpu}").hardware()
    if products is None:
        return rates
    bf16 = next(matmul for matmul in rates.matmuls if matmul.dtype == "bfloat16")
    return rates.model_copy(update={"matmuls": tuple(one.slower(bf16.rate / products) for one in rates.matmuls)})


def estimate(config: ViTConfig, batch_size: int, work: BlockWork, rates: Hardware, precision: str) -> Estimate:
    """Estimate a step of `batch_size` images.

    work: that of one block for `batch_size` images; all blocks are alike.
    precision: bf16 or fp8.
    """
    profile = estimate_model(config, precision, rates, ("tp1",), compiled=True)
    planner, ends = planned(config, batch_size, profile)
    tensor_cores, copy = {matmul.dtype: matmul for matmul in rates.matmuls}, rates.copy_
    assert copy is not None, "a data sheet has a rate of memory"
    depth, launches = config.num_blocks, work.launches
    tile = rates.kernels.attention_tile
    attended = sum(_attention_flops(launch, tile) for launch in launches if launch.kind == "attention")
    seconds = Seconds(
        products=depth
        * sum(
            tensor_cores[launch.dtype].seconds(launch.flops) + copy.seconds(launch.widest)
            for launch in launches
            if launch.kind == "product"
        ),
        attention=depth * tensor_cores["bfloat16"].seconds(attended) / rates.kernels.attention,
        memory=depth * copy.seconds(work.moved),
        gaps=depth * len(launches) * rates.kernels.gap,
        ends=ends,
        update=copy.seconds(update_bytes(precision, one_pass=True, no_gradient_sum=True) * config.parameters),
    )
    return Estimate(seconds, planner, config.flops * batch_size, rates.peaks["bfloat16"])


def planned(config: ViTConfig, batch_size: int, profile: ModelProfile) -> tuple[float, float]:
    """Return the planner's seconds of a step, and of its layers embed and head with the host's work around them."""
    ends = sum(_layer_seconds(profile, name, batch_size) for name in ("embed", "head")) + profile.microbatch
    block = _layer_seconds(profile, config.layers[config.layer_names[1]].kind, batch_size)
    return ends + profile.optimizer.seconds(config.parameters) + config.num_blocks * block, ends


def _attention_flops(launch: Launch, tile: int) -> float:
    """Return the FLOPs of attention as the planner counts them: in full tiles, backward as twice the forward."""
    batch, heads, tokens, features = launch.shape
    times = 2 if "backward" in launch.name else 1
    return times * batch * tiled_flops(AttentionShape(tokens, heads, features), tile)


def _layer_seconds(profile: ModelProfile, kind: str, rows: int) -> float:
    """Return the planner's seconds of forward and backward of a layer."""
    layer = next(
        layer for layer in profile.layers if layer.layer == kind and layer.checkpoint == "none" and not layer.wrapped
    )
    return layer.forward.seconds(rows) + layer.backward.seconds(rows)
