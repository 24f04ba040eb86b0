"""Figures that the planner predicts, compared with measurements of gpu_micro.py and bench_gpu.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.dry.roofline import planned
from bench.gpu_models import predicted_seconds
from vitpar.models import ViTConfig, model_config
from vitpar.models.description import AttentionShape
from vitpar.planner.profile.cluster import Cluster
from vitpar.planner.profile.estimate import FLOAT8, estimate_model, tiled_flops

FAR = 0.15
"""Relative difference from which a prediction has to be explained."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Compared:
    """A figure with its prediction."""

    what: str
    """Figure."""
    unit: str
    """Unit of both numbers."""
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted

    @property
    def far(self) -> bool:
        """Whether the difference has to be explained."""
        return abs(self.ratio - 1) > FAR

    def cells(self) -> list[str]:
        """Return the cells of its row."""
        mark = " **!**" if self.far else ""
        return [
            self.what,
            f"{self.predicted:,.4g} {self.unit}",
            f"{self.measured:,.4g} {self.unit}",
            f"{self.ratio:.2f}{mark}",
        ]


COLUMNS = ("figure", "predicted", "measured", "measured over predicted")


def rates(rows: Sequence[Row], sheet: Cluster) -> Iterator[Compared]:
    """Yield the rates of gpu_micro.py with those of the data sheet."""
    memory, product = memory_rate(sheet), sheet.matmul["bfloat16"] * sheet.sustained
    for row in of(rows, "copy"):
        yield Compared("copy", "GB/s", memory / 1e9, row["bytes_per_second"] / 1e9)
    for (model, kind), group in grouped(of(rows, "product"), "model", "kind").items():
        flops = sum(row["flops"] for row in group)
        expected = sum(row["flops"] / product + row["widest"] / memory for row in group)
        taken = sum(row["seconds"] for row in group)
        yield Compared(f"products, {model}, {kind}", "TFLOP/s", flops / expected / 1e12, flops / taken / 1e12)
    for (model, scaling, fast), group in grouped(of(rows, "fp8"), "model", "scaling", "fast").items():
        if rate := sheet.matmul.get(FLOAT8):
            flops, taken = (sum(row[key] for row in group) for key in ("flops", "seconds"))
            name = f"fp8, {model}, scales a {scaling}, {'fast' if fast else 'exact'} sums"
            yield Compared(name, "TFLOP/s", rate * sheet.sustained / 1e12, flops / taken / 1e12)
    for shape, row in fastest_attention(rows).items():
        expected = 3 * padded_flops(shape, sheet.kernels.attention_tile) / (product * sheet.kernels.attention)
        name = f"attention {' x '.join(map(str, shape))}, {row['kernel']}"
        yield Compared(name, "ms", 1e3 * expected, 1e3 * (row["forward"] + row["backward"]))
    for row in of(rows, "adamw"):
        yield Compared("AdamW in one pass", "GB/s", memory / 1e9, row["bytes_per_second"] / 1e9)


def steps(rows: Sequence[Row], sheet: Cluster, card: str | None) -> Iterator[Compared]:
    """Yield the steps of bench_gpu.py with their predictions by hand and by the planner."""
    hardware = sheet.hardware(1)
    for row in rows:
        measured = 1e3 * median(row["seconds"])
        name = f"{row['model']}, batch {row['batch_size']}"
        if by_hand := predicted_seconds(row["model"], row["batch_size"], card):
            yield Compared(f"step of {name}, by hand", "ms", 1e3 * by_hand, measured)
        config = model_config(row["model"])
        assert isinstance(config, ViTConfig)
        profile = estimate_model(config, "bf16", hardware, ("tp1",), compiled=True)
        yield Compared(f"step of {name}, planner", "ms", 1e3 * planned(config, row["batch_size"], profile)[0], measured)


def memory_rate(sheet: Cluster) -> float:
    """Return the bytes/s of memory that a data sheet's device reaches."""
    return sheet.memory_bandwidth * (sheet.sustained_memory or sheet.sustained_bandwidth or sheet.sustained)


def of(rows: Iterable[Row], what: str) -> list[Row]:
    """Return the rows of one kind that were measured."""
    return [row for row in rows if row["what"] == what and "error" not in row]


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by the values of `keys`, in their order."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[key] for key in keys)].append(row)
    return found


def fastest_attention(rows: Iterable[Row]) -> dict[tuple[int, ...], Row]:
    """Return the row of the fastest kernel by shape (batch, heads, tokens, features)."""
    shapes = grouped(({**row, "key": tuple(row["shape"])} for row in of(rows, "attention")), "key")
    return {key: min(group, key=lambda row: row["forward"] + row["backward"]) for (key,), group in shapes.items()}


def padded_flops(shape: Sequence[int], tile: int) -> int:
    """Return the FLOPs of attention in forward with full tiles. shape: batch, heads, tokens, features."""
    batch, heads, tokens, features = shape
    return batch * tiled_flops(AttentionShape(tokens, heads, features), tile)
