"""Clusters of which only the data sheet is known: nodes, devices, links; made into a hardware profile.

Rates are the published ones times what is reached in practice (`sustained`, `sustained_bandwidth`), so a plan for a
cluster can be made before there is one. A measured profile is better: ``vitpar profile hardware`` there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from pydantic import Field, ValidationError

from vitpar.errors import PlannerError
from vitpar.io import parse_toml, read_toml
from vitpar.limits import MAX_AMOUNT, MAX_MEASURE, MIN_SUSTAINED
from vitpar.planner.profile.profiles import (
    OPERATIONS,
    OPTIMIZER_BYTES,
    STEPS,
    Curve,
    Hardware,
    Host,
    Link,
    Matmul,
    Operation,
    Overlap,
    Timing,
    exact,
)
from vitpar.planner.profile.record import Amount, ProfileRecord, Ranks, Rate
from vitpar.records import first_wrong
from vitpar.strategy.layer import refuse_many_ranks
from vitpar.text import divisors, nearest, shown

Shape = tuple[int, int]
"""Shape of a group: number of ranks, and the distance from each to the next."""
SIZES = (2**10, 2**20, 2**33)
"""Bytes. Seconds are straight lines over them."""


class Wire(ProfileRecord):
    """A way from one device to others. bandwidth: bytes a second that a device sends, and receives at the same time.
    latency: seconds of a message."""

    bandwidth: Rate
    latency: float = Field(ge=0, le=MAX_MEASURE / MAX_AMOUNT)  # so that many messages have a sum


class HostMemory(ProfileRecord):
    """The memory that +offload moves to. bandwidth: bytes a second from and to a device. memory_bandwidth: of the
    processors, for each device."""

    bandwidth: Rate
    memory_bandwidth: Rate


class Cluster(ProfileRecord):
    """nodes × devices_per_node of one device.

    memory_bytes: of a device. matmul: FLOPs a second, dense, by dtype. memory_bandwidth: bytes a second. sustained: the
    part of `matmul` that large products reach. sustained_bandwidth: the part of memory's and links' rates that is
    reached, as `sustained` if None. intra, inter: within a node, and between nodes for each device. overlap: slow-down
    of computing and of communication that go on together. host: for +offload, None for none. sources: where the figures
    stand.
    """

    name: str
    nodes: Ranks
    devices_per_node: Ranks
    device_name: str
    memory_bytes: Amount
    matmul: dict[str, Rate] = Field(min_length=1)
    memory_bandwidth: Rate
    sustained: float = Field(ge=MIN_SUSTAINED, le=1)
    sustained_bandwidth: float | None = Field(default=None, ge=MIN_SUSTAINED, le=1)
    intra: Wire
    inter: Wire | None = None
    overlap: Overlap | None = None
    host: HostMemory | None = None
    sources: tuple[str, ...] = ()

    def hardware(self, ranks: int | None = None) -> Hardware:
        """Its profile, for `ranks` devices (all, if None). Raises PlannerError if there are not so many."""
        most = self.nodes * self.devices_per_node
        ranks = ranks or most
        refuse_many_ranks(ranks, f"cluster {self.name}")
        if ranks > most:
            raise PlannerError(
                f"{shown(ranks)} ranks do not fit the {most} devices of {shown(self.name)}: use at most {most}"
            )
        if ranks > self.devices_per_node and self.inter is None:
            raise PlannerError(
                f"cluster {shown(self.name)} has several nodes but no inter: add [inter] to the cluster file"
            )
        links = [
            self._link(operation, size, stride)
            for size, stride in group_shapes(ranks)
            for operation in operations(size)
        ]
        host = None
        if self.host is not None:
            update = OPTIMIZER_BYTES / (self.host.memory_bandwidth * self._moving)
            host = Host(timings=_line(0.0, self.host.bandwidth * self._moving, SIZES), update=update)
        return Hardware(
            name=self.name,
            device="cuda",
            device_name=self.device_name,
            backend="nccl",
            ranks=ranks,
            ranks_per_node=min(self.devices_per_node, ranks),
            threads=1,
            memory_bytes=self.memory_bytes,
            matmuls=tuple(
                Matmul(dtype=dtype, timings=_line(0.0, rate * self.sustained, (10**6, 10**15)))
                for dtype, rate in self.matmul.items()
            ),
            copy=Curve(timings=_line(0.0, self.memory_bandwidth * self._moving, SIZES)),
            links=tuple(links),
            overlap=self.overlap,
            host=host,
            peaks=self.matmul,
            measured={"estimated": "from published figures", "sources": "; ".join(self.sources)},
        )

    @property
    def _moving(self) -> float:
        return self.sustained_bandwidth or self.sustained

    def _link(self, operation: Operation, ranks: int, stride: int) -> Link:
        members = [rank * stride // self.devices_per_node for rank in range(ranks)]
        nodes, here = len(set(members)), members.count(members[0])
        messages, share = STEPS[operation](ranks)
        wire = self.intra
        bandwidth = self.intra.bandwidth
        if nodes > 1:
            assert self.inter is not None
            wire = self.inter
            # The ranks of a node that are in one group send through as many wires.
            bandwidth = min(self.intra.bandwidth, here * self.inter.bandwidth)
        rate = bandwidth * self._moving / share
        # Trees and hierarchies keep the number of messages that follow each other small.
        latency = wire.latency * min(messages, 2 * max(1, ranks.bit_length() - 1))
        return Link(operation=operation, ranks=ranks, stride=stride, nodes=nodes, timings=_line(latency, rate, SIZES))


def group_shapes(world: int) -> Iterator[Shape]:
    """Every way to cut `world` ranks into groups of equally distant ranks, small groups first."""
    return ((ranks, stride) for ranks in divisors(world)[1:] for stride in divisors(world // ranks))


def operations(ranks: int) -> tuple[Operation, ...]:
    """Those that groups of so many ranks have in a profile."""
    return tuple(operation for operation in OPERATIONS if operation != "p2p" or ranks == 2)


def find_cluster(name: str) -> Cluster:
    """The cluster in the file `name`, or a shipped one by name: 8xH100, or 32x8xH200 for 32 nodes of 8.

    Raises PlannerError for neither, and for a file that is no cluster.
    """
    if name.endswith(".toml") or os.path.isfile(name):
        return _read(Path(name))
    match = re.fullmatch(r"(?:([0-9]{1,5})x)?([0-9]{1,2})x([A-Za-z0-9-]+)", name)
    folder = files("vitpar") / "clusters"
    shipped = {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
    shipped["A100"] = shipped["A100-80GB"]
    kind = match[3] if match else name
    found = next((entry for known, entry in shipped.items() if known.lower() == kind.lower()), None)
    if match is None and found is not None:
        several = f"8x{shown(name)}, or 4x8x{shown(name)} for 4 nodes of 8"
        raise PlannerError(f"cluster '{shown(name)}' does not say how many devices: use {several}")
    if match is None or found is None:
        known = ", ".join(sorted(shipped))
        raise PlannerError(
            f"unknown cluster '{shown(name)}'{nearest(kind, sorted(shipped))}: use a TOML file, or a number and one of "
            f"{known}, as in 8xH100 or 32x8xH200"
        )
    device = parse_toml(found.read_text(encoding="utf-8"))
    nodes, devices = int(match[1] or 1), int(match[2])
    if not nodes or not devices:
        raise PlannerError(f"cluster '{name}' has no devices: use numbers of 1 or more")
    refuse_many_ranks(nodes * devices, f"cluster {name}")
    return Cluster.model_validate({**device, "name": name, "nodes": nodes, "devices_per_node": devices})


def _read(path: Path) -> Cluster:
    try:
        return Cluster.model_validate({"name": path.stem, **read_toml(path)})
    except OSError as error:
        raise PlannerError(f"cannot read the cluster {shown(path)}: {error.strerror}") from None
    except ValidationError as error:
        raise PlannerError(f"{shown(path)} is not a valid cluster file, {first_wrong(error)}: correct it") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise PlannerError(f"{shown(path)} is not a valid cluster file: {shown(error)}: correct it") from None


def _line(latency: float, rate: float, sizes: tuple[int, ...]) -> tuple[Timing, ...]:
    return exact((size, latency + size / rate) for size in sizes)
