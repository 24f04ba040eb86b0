"""What a step costs besides the model: a machine's rates, links and memory, measured once and kept as JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field

from vitpar.limits import MAX_AMOUNT, MAX_RANKS
from vitpar.planner.profile.curve import Curve
from vitpar.planner.profile.record import (
    Amount,
    Factor,
    Measure,
    Notes,
    Ranks,
    Record,
    read_record,
    write_record,
)
from vitpar.records import Many

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
OPTIMIZER_BYTES = 28
"""Read and written by AdamW for a float32 parameter."""


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


class Overlap(Record):
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


class Hardware(Record):
    """A profile of `ranks` devices, `ranks_per_node` on each node.

    device: cpu or cuda. device_name: as the system calls it. backend: of torch.distributed. threads: CPU threads of a
    rank. memory_bytes: of each rank's device (on a CPU its share of the machine's). copy: a tensor copied on all ranks
    at once; sizes are bytes read and written. pipeline: seconds of an action of a pipeline that computes nothing, its
    small message included. host: what +offload takes, None where there is no other memory. reserved_bytes: of a device,
    that no plan can use. pace: of a CPU's cores at which all of this is given (`vitpar.planner.measure.pace`), 0 where
    it is not known. measured: when, and under which versions. Imported profiles lack matmuls, copy and host.
    """

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
    measured: Notes = Field(default_factory=dict)

    def slower(self, computing: float, sending: float) -> Hardware:
        """The same machine with the seconds of either kind times a factor."""
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

    def at_pace(self, pace: float) -> Hardware:
        """The machine when its cores had that pace; itself where its own is not known."""
        if not (pace and self.pace):
            return self
        factor = pace / self.pace
        return self.slower(factor, factor).model_copy(update={"pace": pace})

    def save(self, path: Path) -> None:
        """Write it as JSON; a reader sees the old file or the whole new one. Raises PlannerError."""
        write_record(self, path, "hardware profile")


def read_hardware(path: Path) -> Hardware:
    """The profile in the JSON file `path`. Raises PlannerError, naming the key that is wrong."""
    return read_record(Hardware, path, "hardware profile", "vitpar profile hardware")
