"""`vitpar profile`: measure a machine and a model for the planner."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from vitpar.launch import World, find_world
from vitpar.launch.resources import choose_device, cpu_cores
from vitpar.launch.store import meeting_place
from vitpar.launch.world import Device
from vitpar.models import ModelConfig
from vitpar.models.families import config_from_json
from vitpar.planner.profile.curves import Timing
from vitpar.planner.profile.profiles import CHECKPOINTS, OPERATIONS, Hardware, ModelProfile, always_wrapped
from vitpar.recipe import Recipe
from vitpar.recipe.machine import default_ranks, on_device, resolve
from vitpar.recipe.request import RecipeRequest
from vitpar.strategy import parse
from vitpar.strategy.layer import refuse_many_ranks
from vitpar.tasks.data import model_of
from vitpar.text import count
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import data_table, print_words, progress_bar, refuse_unwritable
from vitpar_cli.profiled import planned_recipe
from vitpar_cli.world import run_in_world

if TYPE_CHECKING:
    import torch

BUSY = 0.2
"""Median relative spread of points above which a profile is not reliable."""

app = typer.Typer(no_args_is_help=True, help="Measure this machine, for the planner.")


@app.command()
def hardware(
    ranks: int | None = typer.Option(
        None, "--ranks", min=1, help="Ranks to measure with.  \\[default: one per GPU, or per CPU core]"
    ),
    out: Path = typer.Option(Path("hardware.json"), "--out", help="JSON file to write the profile to."),
    name: str | None = typer.Option(None, "--name", help="Name of the profile.  \\[default: 4xcpu, 8xcuda]"),
    seconds: float = typer.Option(0.25, "--seconds", min=0.001, help="Approximate seconds per measured point."),
    device: o.DeviceName = None,
    as_json: bool = typer.Option(False, "--json", help="Also print the profile as JSON."),
) -> None:
    """Measure matrix products, memory, links between ranks, and how they slow each other down.

    Every operation runs in every group that plans can form, on all ranks at once. Train with as many ranks as you
    measure with, because ranks on a CPU share its cores.

    Example: vitpar profile hardware --ranks 4 --out hardware.json
    """
    device_type = choose_device(device)
    world = ranks or default_ranks(device_type)
    resolve(parse(f"dp{world}"), device_type)  # refuses more ranks than the launcher or the GPUs provide
    refuse_unwritable(out)
    run_in_world(world, device_type, _hardware, name or f"{world}x{device_type}", seconds, out, as_json)


def _hardware(device: "torch.device", name: str, seconds: float, out: Path, as_json: bool) -> int:
    """Profile the machine with the rank of `device`, and return the exit code."""
    import torch.distributed as dist

    from vitpar.planner.measure.hardware import MeasureEffort, profile_hardware

    per_node = joined.local_size if (joined := find_world()) else 1
    with progress_bar("measuring", shown=dist.get_rank() == 0 and not as_json) as progress:
        profile = profile_hardware(name, device, per_node, MeasureEffort.usual(device.type, seconds), progress)
    if dist.get_rank() == 0:
        profile.save(out)
        typer.echo(profile.model_dump_json(by_alias=True)) if as_json else _show_hardware(profile, out)
    return 0


@app.command()
@o.shared(asked=o.recipe(*o.SUBJECT, "precision", "compile_blocks"))
def model(
    asked: RecipeRequest,
    num_classes: int | None = typer.Option(
        None, "--num-classes", min=2, help="Classes of the model.  \\[default: the data's, or 10]"
    ),
    ranks: int | None = typer.Option(
        None, "--ranks", min=1, help="Ranks of the largest stage to plan for.  \\[default: GPUs or CPU cores]"
    ),
    out: Path = typer.Option(Path("model.json"), "--out", help="JSON file to write the profile to."),
    seconds: float = typer.Option(0.1, "--seconds", min=0.001, help="Approximate seconds per measured point."),
    device: o.DeviceName = None,
    as_json: bool = typer.Option(False, "--json", help="Also print the profile as JSON."),
) -> None:
    """Measure a model's layers on one device: time and memory of every tensor-parallel shard, forward and backward.

    One process computes the shards of one rank as the runtime does, but without communicating with other ranks. On a
    CPU as many processes as ranks do so at the same time, because they also share the machine in training.

    Example: vitpar profile model --recipe digits --ranks 4 --out model.json

    Example: vitpar profile model --task mlm --data data_shards/text
    """
    device_type = choose_device(device)
    merged = on_device(planned_recipe(asked, doing="a profile"), device_type)
    largest = ranks or default_ranks(device_type)
    refuse_many_ranks(largest, "the world")
    config = model_of(merged, num_classes, 10)
    refuse_unwritable(out)
    ranks = largest if device_type == "cpu" else 1
    run_in_world(ranks, None, _model, device_type, merged, config, largest, seconds, out, as_json)


def _model(
    world: World,
    device_type: Device,
    recipe: Recipe,
    config: ModelConfig,
    largest: int,
    seconds: float,
    out: Path,
    as_json: bool,
) -> int:
    """Profile the model in a rank of `world`, and return the exit code."""
    import torch

    from vitpar.parallel import Execution
    from vitpar.parallel.compiling import compiler_fault
    from vitpar.planner.measure.clock import Clock, Neighbours
    from vitpar.planner.measure.model import profile_model

    where = torch.device(device_type)
    shared = device_type == "cpu" and world.size * torch.get_num_threads() > cpu_cores()
    clock = Clock(where, Neighbours(world.rank, world.size, meeting_place(world), shared), seconds)
    train = recipe.train
    compiled = device_type == "cuda" and compiler_fault(where) is None if train.compile is None else train.compile
    execution = Execution(
        1,
        train.precision,
        compile=compiled,
        fp8_min_features=train.fp8_min_features,
        fp8_fast_accum=train.fp8_fast_accum,
    )
    with progress_bar("measuring", shown=world.rank == 0 and not as_json) as progress:
        profile = profile_model(config, execution, largest, clock, world.size, train.attention, progress)
    if world.rank == 0:
        profile.save(out)
        typer.echo(profile.model_dump_json()) if as_json else _show_model(profile, out)
    return 0


def _show_hardware(profile: Hardware, out: Path) -> None:
    """Print the main figures of a profile and the path it was written to."""
    console = Console(highlight=False)
    console.print(f"{profile.name}: {count(profile.ranks, 'rank')} of {profile.device_name}")
    table = data_table("", "GFLOP/s by matrix size")
    for matmul in profile.matmuls:
        rates = (f"{round((t.size / 2) ** (1 / 3))}: {t.size / t.seconds / 1e9:,.1f}" for t in matmul.timings)
        table.add_row(matmul.dtype, "  ".join(rates))
    console.print(table)
    if copy := profile.copy_:
        fastest = max(t.size / t.seconds for t in copy.timings)
        console.print(f"memory     {fastest / 1e9:,.1f} GB/s read and written")
    if profile.links:
        console.print(_links(profile))
    if overlap := profile.overlap:
        console.print(
            f"overlap    matrix products take {overlap.compute:.2f} times as long, "
            f"an all-reduce {overlap.communication:.2f} times",
        )
    curves = [*profile.matmuls, *([copy] if copy else []), *profile.links]
    _close(console, [timing for curve in curves for timing in curve.timings], out)


def _show_model(profile: ModelProfile, out: Path) -> None:
    """Print the main figures of a profile and the path it was written to."""
    console, kinds = Console(highlight=False), config_from_json(profile.model).kinds
    beside = f", {count(profile.processes, 'process')} at a time" if profile.processes > 1 else ""
    console.print(f"{profile.model['name']} in {profile.precision} on {profile.device_name}{beside}")
    several = len({layer.layer for layer in profile.layers}) > 3
    title = "a block on the first rank, without communication"
    numbers = ("forward ms", "backward ms", "samples/s", "saved MB")
    table = data_table(*["block"] * several, "strategy", "rows", numbers=numbers, title=title)
    for layer in profile.layers:
        if kinds[layer.layer].is_block and layer.wrapped == always_wrapped(layer.tensor):
            rows = layer.forward.timings[-1].size
            times = [curve.timings[-1].seconds for curve in (layer.forward, layer.backward)]
            figures = (f"{times[0] * 1e3:,.2f}", f"{times[1] * 1e3:,.2f}", f"{rows / sum(times):,.0f}")
            table.add_row(
                *[layer.layer] * several,
                layer.tensor + CHECKPOINTS[layer.checkpoint],
                str(rows),
                *figures,
                f"{layer.saved.of(rows) / 1e6:,.2f}",
            )
    console.print(table)
    optimizer = profile.optimizer.timings[-1]
    words = f"optimizer  {optimizer.seconds / optimizer.size * 1e9:,.2f} ms per million parameters, including the norm"
    console.print(words)
    console.print(f"micro-batch {profile.microbatch * 1e3:,.2f} ms in addition to its layers")
    curves = [curve for layer in profile.layers for curve in (layer.forward, layer.backward)]
    _close(console, [timing for curve in curves for timing in curve.timings], out)


def _close(console: Console, timings: Sequence[Timing], out: Path) -> None:
    spread = statistics.median(timing.spread for timing in timings)
    console.print(f"spread     {spread:.0%} of a point (median of all points)")
    if spread > BUSY:
        words = "timings vary because ranks share cores or other programs run: measure again on an idle machine"
        print_words(console, f"warning: {words}", "yellow")
    console.print(f"written    {out}", soft_wrap=True)


def _links(profile: Hardware) -> Table:
    table = data_table("ranks", "stride", title="latency in ms + GB/s")
    table.padding = (0, 1, 0, 0)
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
