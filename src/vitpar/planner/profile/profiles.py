"""Profiles: what a machine and a model cost, whatever the plan. Measured once and kept as JSON."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from vitpar.limits import MAX_AMOUNT, MAX_RANKS
from vitpar.planner.profile.record import Amount, Factor, Measure, Notes, Profile, ProfileRecord, Ranks, Rate, Seconds
from vitpar.records import Many
from vitpar.strategy import parse
from vitpar.strategy.execution import Rules
from vitpar.text import shown

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
STEPS: dict[str, Callable[[int], tuple[int, float]]] = {
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
    "all_gather": lambda n: (n - 1, (n - 1) / n),
    "reduce_scatter": lambda n: (n - 1, (n - 1) / n),
    "all_to_all": lambda n: (n - 1, (n - 1) / n),
    "p2p": lambda n: (1, 1.0),
}
"""By operation, for n ranks in a ring: messages one after the other, and the part of the tensor that a rank sends."""
HARDWARE, MODEL = Path("hardware.json"), Path("model.json")
"""Default files of `vitpar profile` and of the commands that read profiles."""
OPTIMIZER_BYTES = 28
"""Read and written by AdamW for a float32 parameter."""
LayerKind = Literal["embed", "block", "head"]
CHECKPOINTS = {"none": "", "full": "+ckpt", "selective": "+ckpt.selective"}
"""Policies, and how a strategy names them."""


class Timing(ProfileRecord):
    """One measured point.

    size: bytes, or FLOPs, as the curve says. seconds: the median. spread: half the distance between the quartiles over
    the median. samples: how many were taken. skew: seconds that the slowest process takes more than the others.
    scratch: bytes that it takes meanwhile, besides what it is given and gives.
    """

    size: Amount
    seconds: Seconds
    spread: Measure
    samples: Amount
    skew: Measure = 0.0
    scratch: int = Field(default=0, ge=0, le=MAX_AMOUNT)

    def slower(self, factor: float) -> Self:
        """Return a copy with all seconds multiplied by `factor`."""
        return self.model_copy(update={"seconds": self.seconds * factor, "skew": self.skew * factor})


def exact(points: Iterable[tuple[int, float]]) -> tuple[Timing, ...]:
    """(size, seconds) that were not measured."""
    return tuple(Timing(size=size, seconds=seconds, spread=0, samples=1) for size, seconds in points)


class Curve(ProfileRecord):
    """Seconds over sizes: straight between the measured points, and never falling."""

    timings: Many[Timing] = Field(min_length=1)

    @field_validator("timings")
    @classmethod
    def _in_order(cls, timings: tuple[Timing, ...]) -> tuple[Timing, ...]:
        sizes = [timing.size for timing in timings]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"sizes {shown(sizes)} are not ascending: sort them and give each once")
        return timings

    def slower(self, factor: float) -> Self:
        """Return a copy with all seconds multiplied by `factor`."""
        # Made anew: a copy would keep what the curve has remembered.
        return type(self)(**{**dict(self), "timings": tuple(timing.slower(factor) for timing in self.timings)})

    def seconds(self, size: float) -> float:
        """How long `size` takes: below the smallest measured size as long as that, above the largest at the rate of
        the last two."""
        sizes, rising = self._points
        if size <= sizes[0]:
            return rising[0]
        if size <= sizes[-1]:
            right = bisect_left(sizes, size)
            share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
            return rising[right - 1] + share * (rising[right] - rising[right - 1])
        # A noisy last step may be flat, but more work is not free.
        slope = rising[-1] / sizes[-1]
        if len(sizes) > 1:
            slope = max(slope / 2, (rising[-1] - rising[-2]) / (sizes[-1] - sizes[-2]))
        return rising[-1] + slope * (size - sizes[-1])

    def skew(self, size: float) -> float:
        """Seconds by which the slowest process is later than the others: the part that it was of the measured size
        nearest to `size`."""
        nearest = min(self.timings, key=lambda timing: abs(timing.size - size))
        return nearest.skew / nearest.seconds * self.seconds(size)

    def scratch(self, size: float) -> float:
        """Bytes that `size` takes meanwhile, besides what is given and comes out: the part that it was of the measured
        size nearest to it."""
        nearest = min(self.timings, key=lambda timing: abs(timing.size - size))
        return nearest.scratch / nearest.size * size

    @cached_property
    def least(self) -> float:
        """Seconds that a unit of size takes at least, at any size."""
        sizes, rising = self._points
        tail = self.seconds(2 * sizes[-1]) - rising[-1]
        return min(tail / sizes[-1], *(seconds / size for size, seconds in zip(sizes, rising, strict=True)))

    @property
    def latency(self) -> float:
        """Seconds that even nothing takes, by the straight line nearest to the points (`fit`)."""
        return self._line[0]

    @property
    def rate(self) -> float:
        """Size a second of more and more, by the same line; infinite where size does not matter."""
        return 1 / self._line[1] if self._line[1] else float("inf")

    @cached_property
    def _points(self) -> tuple[list[int], list[float]]:
        return [t.size for t in self.timings], list(accumulate((t.seconds for t in self.timings), max))

    @cached_property
    def _line(self) -> tuple[float, float]:
        return fit([t.size for t in self.timings], [t.seconds for t in self.timings])


class Link(Curve):
    """One operation among `ranks` ranks, `stride` apart (1: neighbours), while all other ranks do the same in groups of
    their own.

    nodes: how many nodes such a group spans. Sizes are bytes of the whole tensor: what is reduced, gathered or
    scattered; of all_to_all what each rank holds; of p2p the message.
    """

    operation: Operation
    ranks: int = Field(ge=2, le=MAX_RANKS)
    stride: Ranks
    nodes: Ranks


class Matmul(Curve):
    """Products of square matrices of one dtype, on all ranks at once. Sizes are FLOPs."""

    dtype: str


class Overlap(ProfileRecord):
    """How many times longer things take while the other kind runs beside them, 1 or more.

    compute: matrix products during an all-reduce. communication: an all-reduce during matrix products.
    """

    compute: Factor
    communication: Factor


class Host(Curve):
    """Moving a tensor from a GPU to the host's memory or back, on all ranks at once. Sizes are bytes.

    update: seconds of the optimizer for an element there.
    """

    update: Measure


class Hardware(Profile):
    """A profile of `ranks` devices, `ranks_per_node` on each node.

    device: cpu or cuda. device_name: as the system calls it. backend: of torch.distributed. threads: CPU threads of a
    rank. memory_bytes: of each rank's device (on a CPU its share of the machine's). copy: a tensor copied on all ranks
    at once; sizes are bytes read and written. pipeline: seconds of an action of a pipeline that computes nothing, its
    small message included. host: what +offload takes, None where there is no other memory. reserved_bytes: of a device,
    that no plan can use. pace: of a CPU's cores at which all of this is given (``measure.clock.CpuSpeedProbe``), 0
    where it is not known. peaks: dense FLOPs a second of a device by dtype, as its data sheet has them; none where they
    are not known. measured: when, and under which versions. Imported profiles lack matmuls, copy and host.
    """

    kind = "hardware"

    format: Literal["vitpar hardware 1"] = "vitpar hardware 1"
    name: str
    device: Literal["cpu", "cuda"]
    device_name: str
    backend: str
    ranks: Ranks
    ranks_per_node: Ranks
    threads: Amount
    memory_bytes: Amount
    matmuls: Many[Matmul] = ()
    copy_: Curve | None = Field(default=None, alias="copy")
    links: Many[Link] = ()
    overlap: Overlap | None = None
    host: Host | None = None
    pipeline: Measure = 0.0
    reserved_bytes: int = Field(default=0, ge=0, le=MAX_AMOUNT)
    pace: Measure = 0.0
    peaks: dict[str, Rate] = Field(default_factory=dict)
    measured: Notes = Field(default_factory=dict)

    def slower(self, computing: float, sending: float) -> Self:
        """Return a copy with the seconds of computing and of communication multiplied by a factor each."""
        host = self.host and self.host.slower(sending).model_copy(update={"update": self.host.update * computing})
        return self.model_copy(
            update={
                "matmuls": tuple(matmul.slower(computing) for matmul in self.matmuls),
                "copy_": self.copy_ and self.copy_.slower(computing),
                "links": tuple(link.slower(sending) for link in self.links),
                "host": host,
                "pipeline": self.pipeline * computing,
            }
        )

    def at_pace(self, pace: float) -> Self:
        """The machine when its cores had that pace; itself where its own is not known."""
        if not (pace and self.pace):
            return self
        return self.slower(pace / self.pace, pace / self.pace).model_copy(update={"pace": pace})


class Bytes(ProfileRecord):
    """Memory that grows with the rows: `fixed` and `per_row` bytes."""

    fixed: Measure
    per_row: Measure

    def of(self, rows: float) -> float:
        """Bytes of `rows` rows."""
        return self.fixed + self.per_row * rows


class LayerProfile(ProfileRecord):
    """One kind of layer as one rank computes it, without anything that is sent.

    Sizes of curves are rows: images of a micro-batch that one tensor-parallel group works on together.
    tensor: the part of the strategy that changes the arithmetic, such as tp4+2d; tp1 for none. checkpoint: the policy.
    wrapped: whether ``fully_shard`` is around it, its parameters gathered already. backward: computing again included.
    input_share: of the backward that gives the gradients of inputs; the rest gives those of weights. saved: kept from
    forward to backward. workspace: more than that at most, during either.
    """

    layer: LayerKind
    tensor: str
    checkpoint: Literal["none", "full", "selective"]
    wrapped: bool
    forward: Curve
    backward: Curve
    input_share: float = Field(ge=0, le=1)
    saved: Bytes
    workspace: Bytes

    def slower(self, factor: float) -> Self:
        """Return a copy with all seconds multiplied by `factor`."""
        curves = {"forward": self.forward.slower(factor), "backward": self.backward.slower(factor)}
        return self.model_copy(update=curves)


class WeightProfile(ProfileRecord):
    """Cost of a layer's sharded parameters besides communication: gathering and freeing copies, and reducing gradients.

    elements: elements that are gathered.
    """

    layer: LayerKind
    tensor: str
    elements: Amount
    gather: Timing
    reduce: Measure

    def slower(self, factor: float) -> Self:
        """Return a copy with all seconds multiplied by `factor`."""
        return self.model_copy(update={"gather": self.gather.slower(factor), "reduce": self.reduce * factor})


class ModelProfile(Profile):
    """A profile of `model` (the fields of its ViTConfig) in one precision.

    processes: how many measured at the same time, each with `threads` CPU threads, on `cores` (on GPUs one each).
    optimizer: a step, the global norm, and copies in 16 bits; sizes are elements. microbatch: seconds that a
    micro-batch takes besides its layers. pace: as in `Hardware`. error_band: mean relative error of estimated times in
    their calibration; None where times were measured.
    """

    kind = "model"

    format: Literal["vitpar model 1"] = "vitpar model 1"
    model: dict[str, Any]
    device: Literal["cpu", "cuda"]
    device_name: str
    precision: str
    compiled: bool
    processes: Amount
    threads: Amount
    cores: Amount
    layers: Many[LayerProfile]
    weights: Many[WeightProfile]
    optimizer: Curve
    microbatch: Measure
    pace: Measure = 0.0
    error_band: Measure | None = None
    measured: Notes = Field(default_factory=dict)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensor-parallel parts of strategies that it knows."""
        return tuple(dict.fromkeys(layer.tensor for layer in self.layers))

    @property
    def flags(self) -> frozenset[str]:
        """Checkpointing flags that the profile covers."""
        return frozenset(CHECKPOINTS[layer.checkpoint].lstrip("+") for layer in self.layers) - {""}

    def slower(self, computing: float, sending: float) -> Self:
        """Return a copy with the seconds of computing and of communication multiplied by a factor each."""
        return self.model_copy(
            update={
                "layers": tuple(layer.slower(computing) for layer in self.layers),
                "weights": tuple(weights.slower(sending) for weights in self.weights),
                "optimizer": self.optimizer.slower(computing),
                "microbatch": self.microbatch * computing,
            }
        )

    def at_pace(self, pace: float) -> Self:
        """Return a copy scaled to cores of another speed; unchanged if the own speed is not known."""
        if not (pace and self.pace):
            return self
        return self.slower(pace / self.pace, pace / self.pace).model_copy(update={"pace": pace})


@cache
def always_wrapped(tensor: str) -> bool:
    """Whether ``fully_shard`` is around a layer that is split by nothing but `tensor`."""
    return Rules().wraps(parse(tensor).strategy)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency, seconds a unit) of the line nearest to the points, neither below 0.

    Least squares of the relative errors: absolute ones would let the largest sizes say everything.
    """
    w = wx = wxx = wy = wxy = 0.0
    for x, y in zip(sizes, seconds, strict=True):
        weight = 1 / y**2
        w, wx, wxx, wy, wxy = w + weight, wx + weight * x, wxx + weight * x * x, wy + weight * y, wxy + weight * x * y
    determinant = w * wxx - wx * wx
    if len(sizes) > 1 and determinant > 0:
        latency, slope = (wxx * wy - wx * wxy) / determinant, (w * wxy - wx * wy) / determinant
        if latency >= 0 and slope >= 0:
            return latency, slope
        if slope < 0:
            return wy / w, 0.0
    return 0.0, wxy / wxx
