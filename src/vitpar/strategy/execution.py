"""Execution of a plan's steps: settings in addition to the plan, and the rules for each layer's parameters.

These rules are only here. The runtime follows them (``vitpar.parallel.parallelize``), the cost model prices them, the
search bounds them (``vitpar.planner``), and `vitpar plan` prints them. ``vitpar.strategy.support`` refuses settings
without effect.

| layer             | ``fully_shard`` over | parameters are gathered                | gradients are reduced          |
|-------------------|----------------------|----------------------------------------|--------------------------------|
| dp                | none, or one rank    |                                        | at the step's last micro-batch |
| +zero1            | dp                   | once per step                          | at the step's last micro-batch |
| +zero2            | dp                   | once per step                          | at every micro-batch           |
| fsdp, axis i      | fsdp, i              | for each use; once per step under pp   | at the step's last micro-batch |

Under pp, ``fully_shard`` reduces after all micro-batches instead of at the last one. Schedules that split backward do
so for all other gradients too. `Communication` can change fsdp and i: gathering for each use under pp, reducing at
every micro-batch.

Frozen parameters have no gradients, so that nothing of them is reduced. Below the lowest trained layer there is no
backward, so that nothing is gathered for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vitpar.models.config import ModelConfig
from vitpar.models.derived import with_frozen
from vitpar.models.description import Backward, LayerDescription
from vitpar.strategy.layer import Strategy
from vitpar.strategy.layout import sharding_axes, shards_as_fsdp
from vitpar.strategy.plan import Plan

REDUCE_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
"""Type besides fp32 in which gradients can be reduced, by precision that computes in 16 or 8 bits."""

FP8_MIN_FEATURES = 576
"""Smallest linear layers that multiply in float8, as `multiplies_in_float8` measures them, if a recipe does not say.

By a roofline of the kernels that a compiled block starts, square layers save time from about 520 features on with an
H100 and 390 with an H200, other shapes from fewer on (experiments/results/dry_bench_2026-11-25.md). It is one number
for all GPUs, so that a run computes alike wherever it continues.
"""

FastAccum = Literal["forward", "always", "never"]
"""Float8 products that may accumulate in fewer bits than float32: outputs alone, gradients of inputs too, or none."""

Reduced = Literal["every micro-batch", "last micro-batch", "end of step", "never"]
"""Time at which gradients are reduced: in each backward, in the last one, or after all of them; never if there are
none."""


@dataclass(frozen=True)
class Communication:
    """Settings of gradient reduction and parameter gathering; they change speed and memory, never the result."""

    bucket_cap_mb: float | None = None
    """MiB of gradients per all-reduce where nothing is sharded; None for ``vitpar.parallel.data.BUCKET_MB``."""
    prefetch: int | None = None
    """Number of layers that sharded parameters are gathered ahead, in forward and backward; None for FSDP2's default.
    """
    reshard_after_forward: bool | None = None
    """Whether layers sharded over fsdp or i free gathered parameters after forward; None: yes, except under a pipeline
    and in the head."""
    reduce_every_microbatch: bool | None = None
    """Whether these layers reduce gradients at every micro-batch, so that no unsharded gradients accumulate; None: no.
    """


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
    compile: bool = False
    """Whether blocks are compiled."""
    activation_memory_budget: float | None = None
    """Share of a compiled block's activations that the compiler may keep for backward, 0 to 1; None for all."""
    communication: Communication = field(default_factory=Communication)
    frozen: frozenset[str] = frozenset()
    """Names of the parameters that are not trained."""
    fp8_min_features: int = FP8_MIN_FEATURES
    """Smallest linear layers that multiply in float8 in precision fp8, as `multiplies_in_float8` measures them."""
    fp8_fast_accum: FastAccum = "forward"
    """Float8 products that accumulate in fewer bits."""

    def layers(self, plan: Plan, config: ModelConfig) -> dict[str, LayerExecution]:
        """Return the execution of every layer of a model under `plan`, by name."""
        rules = Rules.under(plan, self.precision, self.communication)
        layers, strategies = with_frozen(config, self.frozen).layers, plan.strategies(config.layer_names)
        return {name: rules.of(strategies[name], layer) for name, layer in layers.items()}


def multiplies_in_float8(takes: int, gives: int, min_features: float) -> bool:
    """Return whether precision fp8 multiplies a linear layer from `takes` to `gives` features in float8.

    It does if their harmonic mean is at least `min_features`: what float8 saves grows with the product of both, what
    scaling costs with their sum. Both count without tensor parallelism, so that every plan computes alike.
    """
    return 2 * takes * gives >= min_features * (takes + gives)


def update_bytes(precision: str, *, one_pass: bool, no_gradient_sum: bool = False) -> int:
    """Return the bytes that AdamW, clipping and 16-bit copies read and write per trained parameter in a step.

    precision: any but fp64.
    one_pass: whether one kernel clips, updates and writes 16-bit copies (``vitpar.training.optim.one_pass``).
    no_gradient_sum: whether a step computes each gradient once: on one rank, in one micro-batch.

    | work                               | torch's passes | one pass | one pass, gradients not added |
    |------------------------------------|----------------|----------|-------------------------------|
    | gradient from 16 to 32 bits        | 2 + 4          | 2 + 4    |                               |
    | norm                               | 4              | 4        | 2                             |
    | clipping                           | 4 + 4          |          |                               |
    | gradient, parameter, moments       | 16 + 12        | 16 + 12  | 14 + 12                       |
    | 16-bit copy                        | 4 + 2          | 2        | 2                             |

    Without 16-bit copies the first and last rows are 0, and gradients have 4 bytes.
    """
    if precision not in REDUCE_DTYPES:
        return 32 if one_pass else 40
    if one_pass:
        return 30 if no_gradient_sum else 40
    return 52


@dataclass(frozen=True)
class LayerExecution:
    """Handling of one layer's parameters and gradients in a step."""

    wrapped: bool
    """Whether ``fully_shard`` wraps the layer."""
    low_precision_copies: bool
    """Whether the layer, which is not wrapped, computes with 16-bit copies that are made once per step."""
    offloaded: bool
    """Whether parameters, gradients and optimizer state are in host memory."""
    reshard_after_forward: bool
    """Whether gathered parameters are freed after forward and gathered again for backward."""
    reshard_after_backward: bool
    """Whether gathered parameters are freed after backward."""
    reduced: Reduced
    """When gradients are summed over the ranks that see other samples."""
    backward: Backward = "all"
    """Gradients that backward computes."""

    @property
    def trained(self) -> bool:
        """Whether parameters have gradients and optimizer state."""
        return self.backward in ("all", "weights")

    @property
    def passes_gradient(self) -> bool:
        """Whether the layer's input has a gradient."""
        return self.backward in ("all", "inputs")

    @property
    def gathers_every_forward(self) -> bool:
        """Whether parameters are gathered for the forward of every micro-batch, not only of the step's first."""
        return self.wrapped and (self.reshard_after_forward or self.reshard_after_backward)

    @property
    def gathers_in_backward(self) -> bool:
        """Whether parameters are gathered for every backward, too."""
        return self.wrapped and self.reshard_after_forward and self.backward != "nothing"


@dataclass(frozen=True)
class Rules:
    """Rules that map a layer's strategy to its execution."""

    pipelined: bool = False
    """Whether the plan has a pipeline."""
    splits_backward: bool = False
    """Whether the schedule computes gradients of inputs and of weights in separate passes."""
    low_precision: bool = False
    """Whether layers compute in 16 bits, with parameters kept in 32."""
    communication: Communication = Communication()
    """Settings that override the defaults."""

    @classmethod
    def under(cls, plan: Plan, precision: str, communication: Communication = Communication()) -> Rules:
        """Return the rules for the layers of `plan` in a precision."""
        return cls(plan.pp != 1, plan.splits_backward, precision in REDUCE_DTYPES, communication)

    def of(self, strategy: Strategy, layer: LayerDescription) -> LayerExecution:
        """Return the execution of `layer` under `strategy`."""
        as_fsdp, wrapped = shards_as_fsdp(strategy), self.wraps(strategy)
        reshard = self.communication.reshard_after_forward
        if reshard is None:
            # Under a pipeline a gather for every micro-batch would cost more than the memory is worth.
            reshard = not self.pipelined and not layer.keeps_gathered
        reduced: Reduced = "last micro-batch"
        if strategy.zero == 2 or (as_fsdp and self.communication.reduce_every_microbatch):
            reduced = "every micro-batch"
        elif self.pipelined if wrapped else self.splits_backward:
            reduced = "end of step"
        backward: Backward = "weights" if layer.first and layer.backward == "all" else layer.backward
        return LayerExecution(
            wrapped=wrapped,
            low_precision_copies=self.low_precision and not wrapped,
            offloaded=strategy.offload,
            reshard_after_forward=as_fsdp and reshard,
            # A pipeline's schedule keeps parameters gathered from a stage's first micro-batch to its last, and so do
            # +zero1 and +zero2.
            reshard_after_backward=wrapped and not (self.pipelined or strategy.zero),
            reduced=reduced if backward in ("all", "weights") else "never",
            backward=backward,
        )

    def wraps(self, strategy: Strategy) -> bool:
        """Return whether ``fully_shard`` wraps layers with `strategy`: to shard, to offload, or for 16-bit copies.

        Other layers make their own 16-bit copies. A schedule that splits backward cannot use those: it looks for the
        gradients of weights at the tensors that are computed with.
        """
        return bool(sharding_axes(strategy)) or strategy.offload or (self.low_precision and self.splits_backward)
