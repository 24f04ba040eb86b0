"""Markdown tables of the dry bench."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.dry.roofline import Estimate
from bench.dry.work import BlockWork, Launch, Resources
from bench.gpu_models import prediction
from bench.harness import table
from vitpar.models import ViTConfig

SHORTEST = 0.1
"""Passes below which kernels are added up in one row."""


@dataclass(frozen=True)
class Row:
    """A model with its work and its estimate."""

    config: ViTConfig
    """Model."""
    batch_size: int
    """Images a step."""
    work: BlockWork
    """Work of one block."""
    estimate: Estimate
    """Estimate of a step."""

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.config.name}, batch {self.batch_size}"

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON, with totals of the block."""
        totals = {"passes": self.work.passes, "moved": self.work.moved, "saved": self.work.saved}
        block = totals | asdict(self.work)
        return {
            "model": self.config.name,
            "batch_size": self.batch_size,
            "block": block,
            "step": self.estimate.to_json(),
        }


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table with one row for each model: what a block does."""
    columns = ("model", "passes a block", "forward", "backward", "GB moved a block", "products", "attention")
    cells = []
    for row in rows:
        work, kinds = row.work, Counter(launch.kind for launch in row.work.launches)
        halves = (sum(_bytes(launch) for launch in graph.launches) / work.activation for graph in work.graphs)
        cells.append(
            [
                row.name,
                f"{work.passes:.1f}",
                *(f"{half:.1f}" for half in halves),
                f"{work.moved / 1e9:.2f}",
                *(str(kinds[kind]) for kind in ("product", "attention", "triton", "small")),
                f"{work.saved / 2**20:,.0f}",
                f"{work.saved / work.activation:.1f}",
            ]
        )
    yield from table((*columns, "Triton", "small", "MiB saved a block", "passes saved"), cells)


def estimates(rows: Sequence[Row], gpu: str) -> Iterator[str]:
    """Yield the table of estimated steps. gpu: name of its data sheet; the predictions are for H100 and H200."""
    columns = ("model", "products", "attention", "memory", "gaps", "ends", "update", "step, ms", "MFU")
    cells = []
    for row in rows:
        found = row.estimate
        seconds = found.seconds
        parts = (seconds.products, seconds.attention, seconds.memory, seconds.gaps, seconds.ends, seconds.update)
        planner = f"{1e3 * found.planner:.0f} ms, {100 * found.mfu(found.planner):.1f} %"
        foretold = prediction(row.config.name, row.batch_size, gpu)
        times = (f"{1e3 * part:.1f}" for part in (*parts, seconds.step))
        cells.append([row.name, *times, f"{100 * found.mfu(seconds.step):.1f} %", planner, foretold])
    yield from table((*columns, "planner", "predicted before"), cells)


def kernels(row: Row) -> Iterator[str]:
    """Yield the table of the kernels of a block in the order of their start, small ones added up."""
    columns = ("direction", "kernel", "passes", "GFLOP", "shape", "registers", "spills", "KiB shared")
    cells, rest = [], []
    for graph in row.work.graphs:
        for launch in graph.launches:
            passes = launch.bytes / row.work.activation
            if launch.kind in ("triton", "small") and passes < SHORTEST:
                rest.append(launch)
                continue
            name = launch.name if launch.dtype == "bfloat16" else f"{launch.name}, {launch.dtype}"
            cells.append(
                [
                    "backward" if graph.backward else "forward",
                    f"`{name}`",
                    f"{passes:.2f}",
                    f"{launch.flops / 1e9:,.0f}" if launch.flops else "",
                    " x ".join(map(str, launch.shape)),
                    *resources(row.work.resources.get(launch.name, ())),
                ]
            )
    if rest:
        passes = sum(map(_bytes, rest)) / row.work.activation
        found = [one for launch in rest for one in row.work.resources.get(launch.name, ())]
        cells.append(["both", f"{len(rest)} small kernels", f"{passes:.2f}", "", "", *resources(found)])
    yield from table(columns, cells)


def resources(found: Sequence[Resources]) -> tuple[str, str, str]:
    """Return registers of a thread, spilled bytes and shared memory of a kernel's configurations, as ranges."""
    if not found:
        return ("", "", "")
    shared = [one.shared / 2**10 for one in found]
    return (
        _range([one.registers for one in found]),
        _range([one.spills for one in found]),
        _range([round(one, 1) for one in shared]),
    )


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g}–{high:g}"


def _bytes(launch: Launch) -> int:
    return launch.bytes if launch.kind in ("triton", "small") else 0
