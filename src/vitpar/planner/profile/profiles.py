"""Records of hardware and model profiles, which hold for every plan. Measured once and stored as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from vitpar.limits import MAX_AMOUNT, MAX_RANKS
from vitpar.planner.profile.curves import (
    Amount,
    Curve,
    Factor,
    Measure,
    Profile,
    ProfileRecord,
    Ranks,
    Rate,
    Share,
    Timing,
    each,
)
from vitpar.strategy import parse
from vitpar.strategy.execution import FP8_MIN_FEATURES, Rules

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
"""All operations of a hardware profile."""
STEPS: dict[str, Callable[[int], tuple[int, float]]] = {
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
    "all_gather": lambda n: (n - 1, (n - 1) / n),
    "reduce_scatter": lambda n: (n - 1, (n - 1) / n),
    "all_to_all": lambda n: (n - 1, (n - 1) / n),
    "p2p": lambda n: (1, 1.0),
}
"""Ring algorithms: functions from n ranks to (consecutive messages, share of the tensor that a rank sends)."""
HARDWARE, MODEL = Path("hardware.json"), Path("model.json")
"""Default files of `vitpar profile` and of the commands that read profiles."""
OPTIMIZER_BYTES = 28
"""Bytes that AdamW reads and writes per float32 parameter."""
LayerKind = str
"""Kind of a layer (``LayerDescription.kind``), such as embed, block or head."""
CHECKPOINTS = {"none": "", "full": "+ckpt", "selective": "+ckpt.selective"}
"""Checkpointing policies, with their flags in a strategy."""


class Link(Curve):
    """Times of one operation in a group of ranks, while all other ranks do the same in their groups.

    Sizes are bytes of the complete tensor that is reduced, gathered or scattered; for all_to_all the bytes that each
    rank holds; for p2p the message.
    """

    operation: Operation
    """The operation."""
    ranks: int = Field(ge=2, le=MAX_RANKS)
    """Number of ranks in the group."""
    stride: Ranks
    """Distance from one rank of the group to the next; 1 for neighbours."""
    nodes: Ranks
    """Number of nodes that the group spans."""


def spread(ranks: int, stride: int, ranks_per_node: int) -> tuple[int, int]:
    """Return (number of nodes, fewest members on one of them) of the group of this shape that begins at rank 0."""
    nodes = Counter(rank * stride // ranks_per_node for rank in range(ranks))
    return len(nodes), min(nodes.values())


def nics_used(here: float, share: float, ranks_per_node: int, nics_per_node: int | None) -> float:
    """Return the number of network cards whose rate a group has on a node, if it is on several nodes.

    here: members of the group on the node. Each sends over one card, or over its part of more cards than ranks.
    share: 1 over the number of groups on the node that send to other nodes at the same time.
    nics_per_node: network cards of a node, which are shared evenly; None for one per rank.
    """
    nics = nics_per_node or ranks_per_node
    return min(here * max(1.0, nics / ranks_per_node), nics * share)


class Matmul(Curve):
    """Times of products of square matrices, on all ranks at once. Sizes are FLOPs."""

    dtype: str
    """Name of the data type, without "torch."."""


class Overlap(ProfileRecord):
    """Slow-down of computing and communication that run at the same time."""

    compute: Factor
    """Factor by which matrix products take longer during an all-reduce."""
    communication: Factor
    """Factor by which an all-reduce takes longer during matrix products."""

    def at_most_in_turn(self) -> Self:
        """Return a copy with smaller factors if both at a time would take longer than one after the other.

        While both run, 1 / compute + 1 / communication seconds of work are done in a second. Less than 1 is measured on
        CPU cores that ranks share, where each factor also contains the wait for a core. But sending is work for the
        cores too: the two add up.
        """
        done = min(1.0, 1 / self.compute + 1 / self.communication)
        return self.model_copy(update={"compute": self.compute * done, "communication": self.communication * done})


class Host(Curve):
    """Times to copy a tensor between a GPU and host memory, on all ranks at once. Sizes are bytes."""

    update: Measure
    """Seconds of the optimizer per element on the host."""


class Kernels(ProfileRecord):
    """Rates of a device's kernels other than plain products and copies. The defaults are assumed, not measured."""

    attention: Share = 0.55
    """Rate of attention with full tiles, relative to a large product."""
    attention_tile: int = Field(default=128, ge=16, le=1024)
    """Tokens of an attention tile: with 128, 197 tokens take as long as 256."""
    gap: Measure = 2e-6
    """Seconds between two kernels, including the idle time in a product's last wave of tiles."""


class Hardware(Profile):
    """Profile of the devices of a world and of their links. Imported profiles lack matmuls, copy and host."""

    subject = "hardware"

    format: Literal["vitpar hardware 2"] = "vitpar hardware 2"
    """Format and version of the file."""
    name: str
    """Name of the machine."""
    device: Literal["cpu", "cuda"]
    """Type of the devices."""
    device_name: str
    """Name of a device, as the system reports it."""
    backend: str
    """Backend of torch.distributed."""
    ranks: Ranks
    """Number of ranks, each with one device."""
    ranks_per_node: Ranks
    """Number of ranks on each node."""
    memory_bytes: Amount
    """Bytes of memory of a device; on a CPU the rank's share of the node's memory."""
    matmuls: tuple[Matmul, ...] = ()
    """Times of matrix products, by dtype."""
    copy_: Curve | None = Field(default=None, alias="copy")
    """Times to copy a tensor on all ranks at once; sizes are bytes read and written."""
    kernels: Kernels = Kernels()
    """Rates of other kernels, for models that are estimated instead of measured."""
    links: tuple[Link, ...] = ()
    """Times of communication, by operation and group."""
    nics_per_node: Ranks | None = None
    """Number of network cards of a node, which its ranks share; None for one per rank."""
    overlap: Overlap | None = None
    """Slow-down of computing and communication that overlap; None for none."""
    host: Host | None = None
    """Costs of +offload; None if there is no separate host memory."""
    pipeline: Measure = 0.0
    """Seconds of a pipeline action that computes nothing, including its small message; 0 if not measured."""
    reserved_bytes: int = Field(default=0, ge=0, le=MAX_AMOUNT)
    """Bytes of a device's memory that no plan can use."""
    peaks: dict[str, Rate] = Field(default_factory=dict)
    """Dense FLOPs per second of a device by dtype, from its data sheet; empty if unknown."""
    measured: dict[str, str] = Field(default_factory=dict)
    """Date, versions and sources of the figures."""

    def slower(self, computing: float, sending: float) -> Self:
        """Return a copy with the seconds of computing and of communication multiplied by a factor each."""
        host = self.host and self.host.slower(sending).model_copy(update={"update": self.host.update * computing})
        return self.model_copy(
            update={
                "matmuls": each(self.matmuls, lambda timing: timing.slower(computing)),
                "copy_": self.copy_ and self.copy_.slower(computing),
                "links": each(self.links, lambda timing: timing.slower(sending)),
                "host": host,
                "pipeline": self.pipeline * computing,
            }
        )


class Bytes(ProfileRecord):
    """Memory as a linear function of the number of rows."""

    fixed: Measure
    """Bytes at zero rows."""
    per_row: Measure
    """Bytes of each row."""

    def of(self, rows: float) -> float:
        """Return the bytes for `rows` rows."""
        return self.fixed + self.per_row * rows


class LayerProfile(ProfileRecord):
    """One kind of layer as one rank computes it, without communication.

    Sizes of the curves are rows: images of a micro-batch that one tensor-parallel group works on together.
    """

    layer: LayerKind
    """Kind of layer."""
    tensor: str
    """Tensor-parallel part of the strategy, such as tp4+2d; tp1 for none."""
    checkpoint: Literal["none", "full", "selective"]
    """Activation checkpointing policy."""
    wrapped: bool
    """Whether ``fully_shard`` wraps the layer; its parameters are gathered already."""
    forward: Curve
    """Seconds of forward."""
    backward: Curve
    """Seconds of backward, recomputation included."""
    input_share: float = Field(ge=0, le=1)
    """Share of backward that computes gradients of inputs; the rest computes those of weights."""
    saved: Bytes
    """Bytes kept from forward to backward."""
    workspace: Bytes
    """Peak of transient bytes on top of `saved`, in forward or backward."""


class WeightProfile(ProfileRecord):
    """Cost of ``fully_shard`` for one layer apart from communication: packing, unpacking and freeing copies."""

    layer: LayerKind
    """Kind of layer."""
    tensor: str
    """Tensor-parallel part of the strategy, as in `LayerProfile`."""
    elements: Amount
    """Elements that are gathered."""
    gather: Timing
    """Time to gather the parameters and to free them."""
    reduce: Measure
    """Seconds to reduce the gradients."""

    def slower(self, factor: float) -> Self:
        """Return a copy with all seconds multiplied by `factor`."""
        return self.model_copy(update={"gather": self.gather.slower(factor), "reduce": self.reduce * factor})


class ModelProfile(Profile):
    """Profile of one model in one precision."""

    subject = "model"

    format: Literal["vitpar model 2"] = "vitpar model 2"
    """Format and version of the file."""
    model: dict[str, Any]
    """Fields of the model's ModelConfig."""
    device: Literal["cpu", "cuda"]
    """Type of the device."""
    device_name: str
    """Name of the device, as the system reports it."""
    precision: str
    """Name of the precision, as in ``vitpar.parallel.precision``."""
    compiled: bool
    """Whether blocks are compiled."""
    fp8_min_features: int = FP8_MIN_FEATURES
    """Smallest linear layers that multiply in float8 in precision fp8, as in ``Execution``."""
    processes: Amount
    """Number of processes that measured at the same time."""
    layers: tuple[LayerProfile, ...]
    """Layers, by kind, tensor-parallel part, checkpointing policy and ``fully_shard``."""
    weights: tuple[WeightProfile, ...]
    """Costs of ``fully_shard``, by kind of layer and tensor-parallel part."""
    optimizer: Curve
    """Seconds of an optimizer step with the global norm and 16-bit copies; sizes are elements."""
    microbatch: Measure
    """Seconds that a micro-batch takes in addition to its layers."""
    measured: dict[str, str] = Field(default_factory=dict)
    """Date, versions and sources of the figures."""

    @property
    def estimated(self) -> bool:
        """Return whether the times are estimates by arithmetic; otherwise they were measured."""
        return "estimated" in self.measured

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the tensor-parallel parts that the profile covers, such as tp4+2d, in the order of `layers`."""
        return tuple(dict.fromkeys(layer.tensor for layer in self.layers))

    @property
    def flags(self) -> frozenset[str]:
        """Return the checkpointing flags that the profile covers, such as ckpt.selective."""
        return frozenset(CHECKPOINTS[layer.checkpoint].lstrip("+") for layer in self.layers) - {""}

    def slower(self, computing: float, sending: float) -> Self:
        """Return a copy with the seconds of computing and of communication multiplied by a factor each."""
        return self.model_copy(
            update={
                "layers": each(self.layers, lambda timing: timing.slower(computing)),
                "weights": tuple(weights.slower(sending) for weights in self.weights),
                "optimizer": self.optimizer.slower(computing),
                "microbatch": self.microbatch * computing,
            }
        )


@cache
def always_wrapped(tensor: str) -> bool:
    """Return whether ``fully_shard`` wraps every layer with the tensor-parallel part `tensor`, even without fsdp."""
    return Rules().wraps(parse(tensor).strategy)
