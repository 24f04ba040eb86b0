"""What `vitpar profile` shows of what it measured."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from vitpar.strategy.words import count

if TYPE_CHECKING:
    from vitpar.planner.profile.curve import Timing
    from vitpar.planner.profile.hardware import Hardware
    from vitpar.planner.profile.model import ModelProfile

BUSY = 0.2  # spread of a point in the middle of all, above which a profile is worth little


def show_hardware(profile: "Hardware", out: Path) -> None:
    """Print the profile's main figures, and where it was written."""
    console = Console()
    console.print(f"{profile.name}: {count(profile.ranks, 'rank')} of {profile.device_name}", highlight=False)
    table = Table("", "GFLOP/s by side of the matrices", box=box.SIMPLE)
    for matmul in profile.matmuls:
        rates = (f"{round((t.size / 2) ** (1 / 3))}: {t.size / t.seconds / 1e9:,.1f}" for t in matmul.timings)
        table.add_row(matmul.dtype, "  ".join(rates))
    console.print(table)
    copies = (profile.copy_,) if profile.copy_ else ()
    for copy in copies:
        fastest = max(t.size / t.seconds for t in copy.timings)
        console.print(f"memory     {fastest / 1e9:,.1f} GB/s read and written", highlight=False)
    if profile.links:
        console.print(_links(profile))
    if profile.overlap:
        o = profile.overlap
        console.print(
            f"together   products take {o.compute:.2f} times as long, an all-reduce {o.communication:.2f} times",
            highlight=False,
        )
    curves = [*profile.matmuls, *copies, *profile.links]
    _close(console, [timing for curve in curves for timing in curve.timings], out)


def show_model(profile: "ModelProfile", out: Path) -> None:
    """Print the profile's main figures, and where it was written."""
    from vitpar.planner.profile.model import CHECKPOINTS, always_wrapped

    console = Console()
    beside = f", {count(profile.processes, 'process')} at a time" if profile.processes > 1 else ""
    console.print(f"{profile.model['name']} in {profile.precision} on {profile.device_name}{beside}", highlight=False)
    title = "a block of the first rank, without what is sent"
    table = Table("strategy", "rows", box=box.SIMPLE, title=title, title_justify="left")
    for heading in ("forward ms", "backward ms", "images/s", "saved MiB"):
        table.add_column(heading, justify="right")
    for layer in profile.layers:
        if layer.layer == "block" and layer.wrapped == always_wrapped(layer.tensor):
            rows, forward, backward = layer.forward.timings[-1].size, layer.forward, layer.backward
            flag = CHECKPOINTS[layer.checkpoint]
            times = [curve.timings[-1].seconds for curve in (forward, backward)]
            figures = (f"{times[0] * 1e3:,.2f}", f"{times[1] * 1e3:,.2f}", f"{rows / sum(times):,.0f}")
            table.add_row(layer.tensor + flag, str(rows), *figures, f"{layer.saved.of(rows) / 2**20:,.2f}")
    console.print(table)
    optimizer = profile.optimizer.timings[-1]
    words = f"optimizer  {optimizer.seconds / optimizer.size * 1e9:,.2f} ms a million parameters, with the norm"
    console.print(words, highlight=False)
    console.print(f"micro-batch {profile.microbatch * 1e3:,.2f} ms besides its layers", highlight=False)
    curves = [curve for layer in profile.layers for curve in (layer.forward, layer.backward)]
    _close(console, [timing for curve in curves for timing in curve.timings], out)


def _close(console: Console, timings: Sequence["Timing"], out: Path) -> None:
    spread = statistics.median(timing.spread for timing in timings)
    console.print(f"spread     {spread:.0%} of a point, in the middle of all", highlight=False)
    if spread > BUSY:
        console.print(
            "warning: figures scatter, as ranks share cores or other programs run: measure again when it is idle",
            style="yellow",
        )
    console.print(f"written    {out}", highlight=False, soft_wrap=True)


def _links(profile: "Hardware") -> Table:
    from vitpar.planner.profile.hardware import OPERATIONS

    table = Table("ranks", "stride", box=box.SIMPLE, padding=(0, 1, 0, 0), title="latency in ms + GB/s")
    for name in OPERATIONS:
        table.add_column(name.replace("_", " "), min_width=11)
    groups = sorted({(link.ranks, link.stride) for link in profile.links})
    cells = {
        (link.ranks, link.stride, link.operation): f"{link.latency * 1e3:.2f} + {link.rate / 1e9:.2f}"
        for link in profile.links
    }
    for ranks, stride in groups:
        table.add_row(str(ranks), str(stride), *(cells.get((ranks, stride, name), "") for name in OPERATIONS))
    return table
