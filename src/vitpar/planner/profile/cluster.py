"""Hardware profiles from data sheets: plan for a cluster before it is available.

Rates are the published ones times the share that is reached in practice (`sustained`, `sustained_bandwidth`). A profile
measured on the cluster by ``vitpar profile hardware`` is more accurate.
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
from vitpar.limits import MAX_AMOUNT, MAX_MEASURE
from vitpar.planner.profile.curves import Amount, Curve, ProfileRecord, Ranks, Rate, Share, Timing, exact
from vitpar.planner.profile.profiles import (
    OPERATIONS,
    OPTIMIZER_BYTES,
    STEPS,
    Hardware,
    Host,
    Kernels,
    Link,
    Matmul,
    Operation,
    Overlap,
    nics_used,
    spread,
)
from vitpar.records import first_wrong
from vitpar.strategy.layer import refuse_many_ranks
from vitpar.text import divisors, nearest, shown

Shape = tuple[int, int]
"""(number of ranks, distance from each rank to the next) of a group."""
SIZES = (2**10, 2**20, 2**33)
"""Sizes in bytes of the points of a curve. Times are linear in them."""


class Wire(ProfileRecord):
    """Connection of a device to others."""

    bandwidth: Rate
    """Bytes per second that a device can send while it receives as many."""
    # The bound keeps the sum over many messages within MAX_MEASURE.
    latency: float = Field(ge=0, le=MAX_MEASURE / MAX_AMOUNT)
    """Seconds of an empty message."""


class Network(Wire):
    """Connection of a node to others. Its bandwidth is that of one network card."""

    nics_per_node: Ranks | None = None
    """Number of network cards (NICs) of a node, which its devices share; None for one per device."""


class HostRates(ProfileRecord):
    """Rates of a node's CPUs: of their memory, which +offload uses, and of input."""

    bandwidth: Rate
    """Bytes per second between host memory and one device, in either direction."""
    memory_bandwidth: Rate
    """Bytes per second that the CPUs read and write, per device."""
    images_per_second: Rate | None = None
    """Images that the CPUs of a node decode and augment in a second; None if it is unknown."""


class Cluster(ProfileRecord):
    """Data sheet of a cluster of equal nodes with equal devices."""

    name: str
    """Name of the cluster."""
    nodes: Ranks
    """Number of nodes."""
    devices_per_node: Ranks
    """Number of devices on each node."""
    device_name: str
    """Name of the device."""
    memory_bytes: Amount
    """Bytes of memory of a device."""
    matmul: dict[str, Rate] = Field(min_length=1)
    """Peak dense FLOPs per second of a device, by dtype."""
    memory_bandwidth: Rate
    """Peak bytes per second of a device's memory."""
    sustained: Share
    """Share of `matmul` that large products reach."""
    sustained_bandwidth: Share | None = None
    """Share of the rates of memory and links that is reached; None for `sustained`."""
    sustained_memory: Share | None = None
    """Share of `memory_bandwidth` that is reached; None for `sustained_bandwidth`."""
    kernels: Kernels = Kernels()
    """Rates of other kernels."""
    intra: Wire
    """Connection of a device within its node."""
    inter: Network | None = None
    """Connection of a node to other nodes; needed for plans over several nodes."""
    overlap: Overlap | None = None
    """Slow-down of computing and communication that overlap; None for none."""
    host: HostRates | None = None
    """Host memory; None if +offload is not available."""
    sources: tuple[str, ...] = ()
    """Sources of the figures."""

    def hardware(self, ranks: int | None = None) -> Hardware:
        """Return the hardware profile of `ranks` devices; None for all.

        Raises PlannerError if the cluster has fewer devices, or lacks `inter` for several nodes.
        """
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
            memory_bytes=self.memory_bytes,
            matmuls=tuple(
                Matmul(dtype=dtype, timings=_line(0.0, rate * self.sustained, (10**6, 10**15)))
                for dtype, rate in self.matmul.items()
            ),
            copy=Curve(timings=_line(0.0, self.memory_bandwidth * (self.sustained_memory or self._moving), SIZES)),
            kernels=self.kernels,
            links=tuple(links),
            nics_per_node=self.inter and self.inter.nics_per_node,
            overlap=self.overlap,
            host=host,
            peaks=self.matmul,
            measured={"estimated": "from published figures", "sources": "; ".join(self.sources)},
        )

    @property
    def _moving(self) -> float:
        return self.sustained_bandwidth or self.sustained

    def _link(self, operation: Operation, ranks: int, stride: int) -> Link:
        """Return the estimated times of an operation in the group that starts at rank 0."""
        nodes, here = spread(ranks, stride, self.devices_per_node)
        messages, share = STEPS[operation](ranks)
        wire, rate = self.intra, self.intra.bandwidth / share
        if nodes > 1:
            assert self.inter is not None
            wire, share_of_nics = self.inter, here / self.devices_per_node
            nics = nics_used(here, share_of_nics, self.devices_per_node, self.inter.nics_per_node)
            # A ring passes each node once. In an all-to-all every member sends to all members on other nodes.
            sent = share if operation != "all_to_all" else here * (ranks - here) / ranks
            rate = min(rate, nics * self.inter.bandwidth / sent)
        rate *= self._moving
        # Tree algorithms need fewer consecutive messages than a ring: about 2 log2(ranks).
        latency = wire.latency * min(messages, 2 * max(1, ranks.bit_length() - 1))
        return Link(operation=operation, ranks=ranks, stride=stride, nodes=nodes, timings=_line(latency, rate, SIZES))


def group_shapes(world: int) -> Iterator[Shape]:
    """Return all shapes of equal groups that partition `world` ranks, small groups first."""
    return ((ranks, stride) for ranks in divisors(world)[1:] for stride in divisors(world // ranks))


def operations(ranks: int) -> tuple[Operation, ...]:
    """Return the operations that a profile has for groups of `ranks` ranks: p2p for pairs only."""
    return tuple(operation for operation in OPERATIONS if operation != "p2p" or ranks == 2)


def find_cluster(name: str) -> Cluster:
    """Return the cluster in the TOML file `name`, or a shipped one by name, such as 8xH100 or 32x8xH200 (nodes first).

    Raises PlannerError for an unknown name and for an invalid file.
    """
    if name.endswith(".toml") or os.path.isfile(name):
        return _read(Path(name))
    match = re.fullmatch(r"(?:([0-9]{1,5})x)?([0-9]{1,2})x([A-Za-z0-9-]+)", name)
    folder = files("vitpar") / "clusters"
    shipped = {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
    shipped["A100"] = shipped["A100-80GB"]
    device_name = match[3] if match else name
    sheet = next((entry for known, entry in shipped.items() if known.lower() == device_name.lower()), None)
    if match is None and sheet is not None:
        several = f"8x{shown(name)}, or 4x8x{shown(name)} for 4 nodes of 8"
        raise PlannerError(f"cluster '{shown(name)}' does not say how many devices: use {several}")
    if match is None or sheet is None:
        known = ", ".join(sorted(shipped))
        raise PlannerError(
            f"unknown cluster '{shown(name)}'{nearest(device_name, sorted(shipped))}: use a TOML file, or a number and "
            f"one of {known}, as in 8xH100 or 32x8xH200"
        )
    device = parse_toml(sheet.read_text(encoding="utf-8"))
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
