"""What the ranks of a plan send each other in a training step, in words, by mesh axis and by flag.

The tables are those of ``vitpar.parallel.tensor``, ``vitpar.parallel.data`` and ``vitpar.parallel.checkpointing``; the
numbers count what one block sends for one micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from vitpar.strategy import Plan, Strategy
from vitpar.strategy.layout import mesh_axes, sharding_axes

STAGES_GATHERED = 3
"""Stages of a rank that torch's schedules keep gathered at a time, at most (`max_active_stages`)."""


@dataclass(frozen=True)
class AxisSummary:
    """One axis of a mesh, and the communication along it in words.

    axis: pp, dp, fsdp, tp, or one of the axes that 2d, 2.5d and 3d arrange tp into: d, i, j, k.
    """

    axis: str
    degree: int
    communication: str


@dataclass(frozen=True)
class FlagSummary:
    """A flag that changes nothing about axes, and its effect in words."""

    flag: str
    effect: str


def pipeline_words(plan: Plan) -> AxisSummary:
    """The pp axis."""
    words = "send activations to the next stage and their gradients back, for every micro-batch"
    return AxisSummary("pp", plan.pipeline_degree, words)


def axis_words(strategy: Strategy, plan: Plan, layers: Collection[str]) -> tuple[AxisSummary, ...]:
    """The axes of the layers that have `strategy`, outermost first. layers: their names."""
    found = []
    for axis, degree in mesh_axes(strategy):
        if axis in ("dp", "fsdp", "d", "i"):
            words = _data_words(axis, strategy, plan)
        else:
            words = _tensor_words(axis, strategy, layers)
        found.append(AxisSummary("tp" if strategy.tensor_mode == "1d" and axis == "j" else axis, degree, words))
    return tuple(found)


def flag_words(strategy: Strategy) -> tuple[FlagSummary, ...]:
    """The flags of `strategy` that no axis tells of."""
    found = []
    if strategy.checkpoint == "full":
        sent = ", with what tp sends there," if strategy.has("tp") else ""
        words = f"layers keep their input alone and compute their forward{sent} again in backward"
        found.append(FlagSummary("+ckpt", words))
    elif strategy.checkpoint:
        words = "layers keep what matrix products, attention and tp give, and compute the rest again in backward"
        found.append(FlagSummary(f"+ckpt.{strategy.checkpoint}", words))
    if strategy.offload:
        words = "parameters, gradients and optimizer state are in host memory; layers copy parameters in to compute"
        found.append(FlagSummary("+offload", words))
    return tuple(found)


def _data_words(axis: str, strategy: Strategy, plan: Plan) -> str:
    """An axis that splits the batch: its ranks hold copies of parameters, or parts that they gather."""
    sharding = sharding_axes(strategy)
    alike = [name for name, _ in mesh_axes(strategy) if name in ("dp", "fsdp", "d", "i")]
    alike = [name for name in alike if (name in sharding) == (axis in sharding)]
    if alike[0] != axis:
        return f"split the batch; communicate in one group with {alike[0]}"
    split = "split the batch; " if axis in ("d", "i") else ""
    if axis not in sharding:
        return f"{split}all-reduce {'the shards of ' if sharding else ''}gradients, once a step"
    gather, reduce = _gathers(strategy, plan), "for every micro-batch" if strategy.zero == 2 else "once a step"
    if gather == reduce:
        return f"{split}all-gather parameters and reduce-scatter gradients, {reduce}"
    return f"{split}all-gather parameters {gather}; reduce-scatter gradients, {reduce}"


def _gathers(strategy: Strategy, plan: Plan) -> str:
    """When sharded parameters are gathered (`_shard` in ``vitpar.parallel.parallelize``)."""
    if plan.pipeline_degree > 1:
        many = plan.virtual_stages > STAGES_GATHERED
        return f"of {STAGES_GATHERED} of a rank's stages at a time, in turns" if many else "once a step"
    if strategy.zero:
        return "once a step"
    return "layer by layer, in forward and in backward of every micro-batch"


def _tensor_words(axis: str, strategy: Strategy, layers: Collection[str]) -> str:
    """An axis that splits arithmetic. Stem and head do little of it; their words are for layers without a block."""
    mode = "sp" if strategy.sequence_parallel else strategy.tensor_mode
    words = _TENSOR_WORDS[mode, axis]
    for part in ("blocks.", "head", "stem"):
        if any(layer.startswith(part) for layer in layers):
            return words[part]
    raise AssertionError("a strategy has layers")


_SUMS = "; all-reduce gradients of what is not split, once a step"
_PARTS = "gather parts of the batch (2 a block in forward, 4 in backward) and reduce-scatter sums (2 and 2)"
_EVERY = ", for every micro-batch"
_STATISTICS = "all-reduce the norm's statistics and the classifier's sums" + _EVERY
_FEATURES = {
    "blocks.": "gather features before every matrix product (4 a block in forward, 4 in backward) and reduce-scatter "
    "their gradients (4 in backward), all-reduce the norms' statistics" + _EVERY,
    "head": _STATISTICS,
    "stem": "split features; send nothing",
}
_TENSOR_WORDS = {
    ("1d", "j"): {
        "blocks.": "all-reduce activations, twice a block in forward and twice in backward" + _EVERY,
        "head": "all-reduce the classifier's sums" + _EVERY,
        "stem": "compute the same; send nothing",
    },
    ("sp", "j"): {
        "blocks.": "split the batch; " + _PARTS + _EVERY + _SUMS,
        "head": "gather the pooled batch and all-reduce the classifier's sums" + _EVERY + _SUMS,
        "stem": "split the batch" + _SUMS,
    },
    ("2d", "j"): _FEATURES,
    ("2.5d", "j"): _FEATURES,
    ("3d", "j"): {
        "blocks.": "split the batch; " + _PARTS + _EVERY + _SUMS,
        "head": "split the batch" + _SUMS,
        "stem": "split the batch" + _SUMS,
    },
    ("3d", "k"): {
        "blocks.": "split features; " + _PARTS + ", all-reduce the norms' statistics" + _EVERY + _SUMS,
        "head": _STATISTICS,
        "stem": "split features; send nothing",
    },
}
"""By mode, axis, and the first of these that the layers hold: a block, the head, the stem."""
