"""Rows of measurements on one GPU: each is printed and written at once, and all are shown in tables at the end."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from bench.gpu_models import card_of
from bench.harness import Report
from bench.one_gpu import settle
from vitpar.models import ViTConfig
from vitpar.parallel.compiling import compiler_fault
from vitpar.training.metrics import peak_flops

COLUMNS = {
    "limits": ("model", "products, TFLOP/s: burst", "sustained", "sustained, of the peak", "copy, GB/s"),
    "vitpar": (
        *("model", "ms a step", "images/s", "MFU", "predicted", "goal", "products alone, sustained", "waits a step"),
        *("kernels a step", "GPU busy", "peak GiB"),
    ),
    "phases": ("model", "ms of a step"),
    "input": (
        *("model", "input", "synthetic, images/s", "JPEG, images/s", "JPEG over synthetic", "target"),
        "input alone, images/s",
    ),
    "fp8": (
        *("model", "bf16, ms", "fp8, ms", "fp8 over bf16", "bf16, GiB", "fp8, GiB", "last loss, bf16"),
        "last loss, fp8",
    ),
}
"""Columns of the table of each section."""


class Run:
    """State of a measurement: options, device, remaining time, and the rows so far.

    failed: whether something that should work failed.
    peak: the chip's dense bf16 peak in FLOP/s, None if unknown. card: the chip that predictions are for, None for none.
    compiled: whether blocks are compiled. products: sustained FLOP/s of products by model.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device, self._report = options, device, Report(options.json)
        self.peak = peak_flops(device, "bf16")
        self.card = card_of(torch.cuda.get_device_name()) if device.type == "cuda" else None
        self.products: dict[str, float] = {}
        self.failed = False
        self._end = time.monotonic() + 60 * options.minutes
        for section in (*COLUMNS, "left_out"):
            self._report.keep(section, [])
        self._shown: dict[str, list[list[str]]] = {section: [] for section in COLUMNS}
        # Not on the CPU, where compiling takes minutes and speed does not matter here.
        fault = compiler_fault(device) if device.type == "cuda" else None
        self.compiled = device.type == "cuda" and fault is None
        if fault:
            self.fail("compiling", fault)

    def has_time(self, what: str, seconds: float) -> bool:
        """Return whether `seconds`, an estimate for a fast GPU, are left; if not, record `what` as left out."""
        left = self._end - time.monotonic()
        if seconds > left and not self.options.tiny:
            self.leave_out(what, f"about {seconds:.0f} s, and {max(0.0, left):.0f} s are left of --minutes")
            return False
        return True

    def leave_out(self, what: str, why: str) -> None:
        """Print and record that something is not measured."""
        print(f"- {what}: left out ({why})", flush=True)
        self._report.keep("left_out", [*self._report.found["left_out"], f"{what}: {why}"])

    def fail(self, what: str, why: str) -> None:
        """Print and record that something cannot be measured although it should work."""
        self.failed = True
        self.leave_out(what, why)

    def row(self, section: str, cells: list[str], **raw: Any) -> None:
        """Print a row of a table and write its raw measurements."""
        told = (f"{column} {cell}" for column, cell in zip(COLUMNS[section][1:], cells[1:], strict=True))
        print(f"- {section}, {cells[0]}: {'; '.join(told)}", flush=True)
        self._shown[section].append(cells)
        self._report.keep(section, [*self._report.found[section], raw])

    def show(self) -> None:
        """Print all tables in Markdown."""
        for section, rows in self._shown.items():
            if rows:
                self._report.show(section, COLUMNS[section], rows, self._report.found[section])


class Memory:
    """Peak of GPU memory that is allocated after creating this object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated() if device.type == "cuda" else 0

    def forget(self) -> None:
        """Reset the peak."""
        if self._device.type == "cuda":
            settle(self._device)
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        """Return the peak in bytes, None without a GPU."""
        settle(self._device)
        return torch.cuda.max_memory_allocated() - self._before if self._device.type == "cuda" else None


def named(config: ViTConfig, batch_size: int) -> str:
    """Return the name of a model and batch size in tables."""
    return f"{config.name}, batch {batch_size}"


def percent(part: float | None) -> str:
    """Return 0.456 as `45.6 %`, None as a dash."""
    return "–" if part is None else f"{100 * part:.1f} %"


def gibibytes(count: int | None) -> str:
    """Return bytes as text in GiB, None as a dash."""
    return "–" if count is None else f"{count / 2**30:.2f}"
