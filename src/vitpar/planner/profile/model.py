"""What a model's layers cost on one device, whatever plan they are part of: measured once and kept as JSON."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vitpar.errors import StrategyError
from vitpar.models.config import ViTConfig
from vitpar.planner.profile.curve import Curve, Timing
from vitpar.planner.profile.record import Amount, Measure, Notes, Record, read_record, write_record
from vitpar.records import Many
from vitpar.strategy import parse, validate
from vitpar.strategy.words import divisors

LayerKind = Literal["stem", "block", "head"]
CHECKPOINTS = {"none": "", "full": "+ckpt", "selective": "+ckpt.selective"}
"""Policies, and how a strategy names them."""


class Bytes(Record):
    """Memory that grows with the rows: `fixed` and `per_row` bytes."""

    fixed: Measure
    per_row: Measure

    def of(self, rows: float) -> float:
        """Bytes of `rows` rows."""
        return self.fixed + self.per_row * rows


class LayerProfile(Record):
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

    def slower(self, factor: float) -> LayerProfile:
        """The same, with all seconds times `factor`."""
        curves = {"forward": self.forward.slower(factor), "backward": self.backward.slower(factor)}
        return self.model_copy(update=curves)


class WeightProfile(Record):
    """What sharded parameters of a layer cost a rank besides sending: to be gathered and dropped again, and for their
    gradients to be reduced. elements: what is gathered."""

    layer: LayerKind
    tensor: str
    elements: Amount
    gather: Timing
    reduce: Measure

    def slower(self, factor: float) -> WeightProfile:
        """The same, with all seconds times `factor`."""
        return self.model_copy(update={"gather": self.gather.slower(factor), "reduce": self.reduce * factor})


class ModelProfile(Record):
    """A profile of `model` (the fields of its ViTConfig) in one precision.

    processes: how many measured at the same time, each with `threads` CPU threads, on `cores` (on GPUs one each).
    optimizer: a step, the global norm, and copies in 16 bits; sizes are elements. microbatch: seconds that a
    micro-batch takes besides its layers. pace: as in `Hardware`.
    """

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
    measured: Notes = Field(default_factory=dict)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensor-parallel parts of strategies that it knows."""
        return tuple(dict.fromkeys(layer.tensor for layer in self.layers))

    @property
    def flags(self) -> frozenset[str]:
        """Of checkpointing, that it knows."""
        return frozenset(CHECKPOINTS[layer.checkpoint].lstrip("+") for layer in self.layers) - {""}

    def slower(self, computing: float, sending: float) -> ModelProfile:
        """The same with the seconds of either kind times a factor."""
        return self.model_copy(
            update={
                "layers": tuple(layer.slower(computing) for layer in self.layers),
                "weights": tuple(weights.slower(sending) for weights in self.weights),
                "optimizer": self.optimizer.slower(computing),
                "microbatch": self.microbatch * computing,
            }
        )

    def at_pace(self, pace: float) -> ModelProfile:
        """The same when the cores had that pace; itself where its own is not known."""
        if not (pace and self.pace):
            return self
        return self.slower(pace / self.pace, pace / self.pace).model_copy(update={"pace": pace})

    def save(self, path: Path) -> None:
        """Write it as JSON; a reader sees the old file or the whole new one. Raises PlannerError."""
        write_record(self, path, "model profile")


def tensors(config: ViTConfig, ranks: int) -> tuple[str, ...]:
    """The tensor-parallel parts of strategies for stages of up to `ranks` ranks that fit the model, `tp1` first, as
    model profiles name them (under 2.5d each square computes as in 2d)."""
    found = ["tp1"]
    for degree in divisors(ranks)[1:]:
        for flag in ("", "+sp", "+2d", "+3d"):
            with suppress(StrategyError):
                validate(parse(f"tp{degree}{flag}"), config, None)
                found.append(f"tp{degree}{flag}")
    return tuple(found)


def always_wrapped(tensor: str) -> bool:
    """Whether ``fully_shard`` is around every layer: under 2d and 3d, which shard weights."""
    return tensor.endswith("d")


def read_model_profile(path: Path) -> ModelProfile:
    """The profile in the JSON file `path`. Raises PlannerError, naming the key that is wrong."""
    return read_record(ModelProfile, path, "model profile", "vitpar profile model")
