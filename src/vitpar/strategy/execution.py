"""How the steps of a plan are executed: the settings beside the plan, and what they do with each layer's parameters.

This is the one place of these rules. The runtime acts by them (``vitpar.parallel.parallelize``), the cost model prices
them, the search bounds them (``vitpar.planner``), settings that they leave without effect are refused
(``vitpar.strategy.support``), and `vitpar plan` tells them.

| layer             | ``fully_shard`` over | parameters are gathered             | gradients are reduced          |
|-------------------|----------------------|-------------------------------------|--------------------------------|
| dp                | none, or one rank    |                                     | at the step's last micro-batch |
| +zero1            | dp                   | once a step                         | at the step's last micro-batch |
| +zero2            | dp                   | once a step                         | at every micro-batch           |
| fsdp, axis i      | fsdp, i              | for every use; once a step under pp | at the step's last micro-batch |

Under pp what is reduced "at the last micro-batch" is reduced when all micro-batches are done, and so are gradients that
``fully_shard`` does not reduce, where a schedule computes those of weights in a backward of their own. `Communication`
can have fsdp and i otherwise: gathered for every use under pp too, reduced at every micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vitpar.strategy.layer import Strategy
from vitpar.strategy.layout import sharding_axes, shards_as_fsdp
from vitpar.strategy.plan import Plan

REDUCE_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
"""By precision that computes in 16 bits: what gradients can be reduced in besides fp32."""

Reduced = Literal["every micro-batch", "last micro-batch", "end of step"]


@dataclass(frozen=True)
class Communication:
    """When gradients and gathered parameters are sent; changes speed and memory, never the result.

    bucket_cap_mb: MiB of gradients of neighbouring layers that share a message, where nothing is sharded; None for
    ``vitpar.parallel.data.BUCKET_MB``. prefetch: how many layers ahead sharded parameters are gathered, in forward and
    in backward; None as FSDP2 does by itself. reshard_after_forward: whether layers that shard over fsdp or i free what
    they gathered after forward; None where that is worth it (not under a pipeline, not in the head).
    reduce_every_microbatch: whether the same layers reduce gradients at every micro-batch, so that no whole ones wait
    for the last; None for not.
    """

    bucket_cap_mb: float | None = None
    prefetch: int | None = None
    reshard_after_forward: bool | None = None
    reduce_every_microbatch: bool | None = None


@dataclass(frozen=True)
class Execution:
    """Settings that decide how steps are executed, in addition to model, plan and devices."""

    batch_size: int
    """Images of a step over all ranks."""
    precision: str = "fp32"
    """Name of the precision, as in ``vitpar.parallel.precision``."""
    reduce_dtype: str | None = None
    """Name of the precision that gradients are reduced in; None for that of `precision`."""
    seed: int = 0
    """Seed of initial values."""
    label_smoothing: float = 0.0
    """Label smoothing, 0 to 1."""
    compile: bool = False
    """Whether blocks are compiled."""
    activation_memory_budget: float | None = None
    """Share of a compiled block's activations that the compiler may keep for backward, 0 to 1; None for all."""
    communication: Communication = field(default_factory=Communication)

    def rules(self, plan: Plan) -> Rules:
        """The rules for the layers of `plan`."""
        return Rules.under(plan, self.precision, self.communication)


@dataclass(frozen=True)
class LayerExecution:
    """Handling of one layer's parameters and gradients in a step."""

    wrapped: bool
    """Whether ``fully_shard`` wraps the layer."""
    narrow_copies: bool
    """Whether the layer, which is not wrapped, computes with 16-bit copies that are made once per step."""
    offloaded: bool
    """Whether parameters, gradients and optimizer state are in host memory."""
    reshard_after_forward: bool
    """Whether gathered parameters are freed after forward and gathered again for backward."""
    reshard_after_backward: bool
    """Whether gathered parameters are freed after backward."""
    reduced: Reduced
    """When gradients are summed over the ranks that see other samples."""

    @property
    def gathers_every_forward(self) -> bool:
        """Whether parameters are gathered for the forward of every micro-batch, not only of the step's first."""
        return self.wrapped and (self.reshard_after_forward or self.reshard_after_backward)

    @property
    def gathers_in_backward(self) -> bool:
        """Whether parameters are gathered for every backward, too."""
        return self.wrapped and self.reshard_after_forward


@dataclass(frozen=True)
class Rules:
    """From a layer's strategy to its execution.

    pipelined: whether the plan has a pipeline. splits_backward: whether its schedule computes gradients of weights in a
    backward of their own. narrow: whether layers compute in 16 bits with parameters that are kept in 32.
    """

    pipelined: bool = False
    splits_backward: bool = False
    narrow: bool = False
    communication: Communication = Communication()

    @classmethod
    def under(cls, plan: Plan, precision: str, communication: Communication = Communication()) -> Rules:
        """Return the rules for the layers of `plan` in a precision."""
        return cls(plan.pp != 1, plan.splits_backward, precision in REDUCE_DTYPES, communication)

    def of(self, strategy: Strategy, layer: str) -> LayerExecution:
        """The execution of the layer called `layer` ("embed", "blocks.0" …, "head") under `strategy`."""
        as_fsdp, wrapped = shards_as_fsdp(strategy), self.wraps(strategy)
        reshard = self.communication.reshard_after_forward
        if reshard is None:
            # Under a pipeline a gather for every micro-batch would cost more than the memory is worth. The head's
            # backward follows its forward at once.
            reshard = not self.pipelined and layer != "head"
        reduced: Reduced = "last micro-batch"
        if strategy.zero == 2 or (as_fsdp and self.communication.reduce_every_microbatch):
            reduced = "every micro-batch"
        elif self.pipelined if wrapped else self.splits_backward:
            reduced = "end of step"
        return LayerExecution(
            wrapped=wrapped,
            narrow_copies=self.narrow and not wrapped,
            offloaded=strategy.offload,
            reshard_after_forward=as_fsdp and reshard,
            # A pipeline's schedule keeps parameters gathered from a stage's first micro-batch to its last, and so do
            # +zero1 and +zero2.
            reshard_after_backward=wrapped and not (self.pipelined or strategy.zero),
            reduced=reduced,
        )

    def wraps(self, strategy: Strategy) -> bool:
        """Whether ``fully_shard`` has anything to do: parameters are sharded or in host memory, or copied to 16 bits
        under a schedule that looks for the gradients of weights at what is computed with."""
        return bool(sharding_axes(strategy)) or strategy.offload or (self.narrow and self.splits_backward)
