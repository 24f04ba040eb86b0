"""`vitpar profile`: measures what the planner needs to know."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vitpar.errors import PlannerError
from vitpar.strategy import parse
from vitpar.strategy.words import count
from vitpar_cli import recipe_options as o
from vitpar_cli.world import choose_device, ranks_available, run_in_world

if TYPE_CHECKING:
    import torch

    from vitpar.planner.hardware import Hardware

CADENCE = 10.0  # seconds between two plain lines at least
BUSY = 0.2  # spread of a point in the middle of all, above which a profile is worth little

app = typer.Typer(no_args_is_help=True, help="Measure this machine, for the planner.")


@app.command()
def hardware(
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Ranks to measure with.  \\[default: one a GPU, or one a CPU core]"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The profile, a JSON file.")] = Path("hardware.json"),
    name: Annotated[str | None, typer.Option("--name", help="What to call it.  \\[default: 4xcpu, 8xcuda]")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.001, help="Time to spend on each point, about.")] = 0.25,
    device: o.DeviceName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile too.")] = False,
) -> None:
    """Measure matrix products, memory, links between ranks, and how they slow each other down.

    Every operation runs in every group that plans can form, on all ranks at once. Train with as many ranks as you
    measured with: on a CPU they share its cores.

    Example: vitpar profile hardware --ranks 4 --out hardware.json
    """
    from vitpar.launch import find_world
    from vitpar.launch.cores import cpu_cores

    kind = choose_device(device)
    world = ranks or ranks_available(kind) or cpu_cores()
    _check_folder(out)

    def work(device: "torch.device") -> int:
        import torch.distributed as dist

        from vitpar.planner.profile_hardware import Effort, profile_hardware

        joined = find_world()
        per_node = joined.local_size if joined else 1
        with _progress(shown=dist.get_rank() == 0 and not as_json) as progress:
            called = name or f"{world}x{device.type}"
            profile = profile_hardware(called, device, per_node, Effort.usual(device.type, seconds), progress)
        if dist.get_rank() == 0:
            profile.save(out)
            typer.echo(profile.model_dump_json(by_alias=True)) if as_json else _print(profile, out)
        return 0

    run_in_world(parse(f"dp{world}"), kind, work)


def _check_folder(out: Path) -> None:
    """Refuse an output that cannot be written before anything is measured."""
    folder = out.absolute().parent
    if not folder.is_dir() or out.is_dir() or not os.access(folder, os.W_OK):
        raise PlannerError(f"cannot write {out}: name a file in a folder that exists and may be written to")


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, so that what is measured can be piped; plain lines now and then where it is no terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task("", total=None)
        said = time.monotonic()

        def progress(done: int, total: int, words: str) -> None:
            nonlocal said
            bar.update(task, completed=done, total=total, description=words)
            if shown and not console.is_terminal and time.monotonic() - said > CADENCE:
                said = time.monotonic()
                console.print(f"{done} of {total} points, now {words}", highlight=False)

        yield progress


def _print(profile: "Hardware", out: Path) -> None:
    console = Console()
    console.print(f"{profile.name}: {count(profile.ranks, 'rank')} of {profile.device_name}", highlight=False)
    table = Table("", "GFLOP/s by side of the matrices", box=box.SIMPLE)
    for matmul in profile.matmuls:
        rates = (f"{round((t.size / 2) ** (1 / 3))}: {t.size / t.seconds / 1e9:,.1f}" for t in matmul.timings)
        table.add_row(matmul.dtype, "  ".join(rates))
    console.print(table)
    fastest = max(t.size / t.seconds for t in profile.copy_.timings)
    console.print(f"memory     {fastest / 1e9:,.1f} GB/s read and written", highlight=False)
    if profile.links:
        console.print(_links(profile))
    if profile.overlap:
        o = profile.overlap
        console.print(
            f"together   products take {o.compute:.2f} times as long, an all-reduce {o.communication:.2f} times",
            highlight=False,
        )
    curves = [*profile.matmuls, profile.copy_, *profile.links]
    spread = statistics.median(timing.spread for curve in curves for timing in curve.timings)
    console.print(f"spread     {spread:.0%} of a point, in the middle of all", highlight=False)
    if spread > BUSY:
        console.print("warning: something else keeps this machine busy: measure again when it is idle", style="yellow")
    console.print(f"written    {out}", highlight=False, soft_wrap=True)


def _links(profile: "Hardware") -> Table:
    from vitpar.planner.hardware import OPERATIONS

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
