"""`vitpar profile`: measures what the planner needs to know."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vitpar.strategy import parse
from vitpar.strategy.layer import refuse_many_ranks
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import refuse_unwritable
from vitpar_cli.profile_view import show_hardware, show_model
from vitpar_cli.world import choose_device, end, enter, ranks_available, resolve, run_in_world

if TYPE_CHECKING:
    import torch

CADENCE = 10.0  # seconds between two plain lines at least

USED = ("model.…", "train.precision", "train.compile", "train.attention")
"""Settings that matter to a model's profile."""

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
    plan = resolve(parse(f"dp{world}"), kind)  # refuses ranks that a launcher or the GPUs do not give
    refuse_unwritable(out)

    def work(device: "torch.device") -> int:
        import torch.distributed as dist

        from vitpar.planner.measure.hardware import Effort, profile_hardware

        joined = find_world()
        per_node = joined.local_size if joined else 1
        with _progress(shown=dist.get_rank() == 0 and not as_json) as progress:
            called = name or f"{world}x{device.type}"
            profile = profile_hardware(called, device, per_node, Effort.usual(device.type, seconds), progress)
        if dist.get_rank() == 0:
            profile.save(out)
            typer.echo(profile.model_dump_json(by_alias=True)) if as_json else show_hardware(profile, out)
        return 0

    run_in_world(plan, kind, work)


@app.command()
def model(
    recipe: o.RecipeFile = None,
    name: o.ModelName = None,
    num_classes: Annotated[int, typer.Option("--num-classes", min=2, help="Classes of the model's head.")] = 10,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Ranks of the largest stage to plan for.  \\[default: GPUs or CPU cores]"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The profile, a JSON file.")] = Path("model.json"),
    precision: o.Precision = None,
    compile_blocks: Annotated[bool, typer.Option("--compile", help="Compile each block.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=0.001, help="Time to spend on each point, about.")] = 0.1,
    device: o.DeviceName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile too.")] = False,
    assignments: o.Assignments = None,
) -> None:
    """Measure a model's layers on one device: time and memory of every tensor-parallel shard, forward and backward.

    The shards of one rank are computed alone, as the runtime would, without the other ranks. On a CPU as many
    processes as ranks do so at the same time, because in training they share the machine too.

    Example: vitpar profile model --recipe experiments/digits.toml --ranks 4 --out model.json
    """
    from vitpar.launch.cores import cpu_cores
    from vitpar.parallel.attention import refuse_attention
    from vitpar.training.recipe.auto_precision import resolve_precision

    o.refuse_idle(assignments, "a profile", USED)
    merged = o.merged_recipe(
        recipe,
        None if recipe else Path("unused"),  # no data is read
        assignments,
        model__name=name,
        train__steps=1 if recipe is None else None,
        train__precision=precision,
        train__compile=compile_blocks or None,
    )
    kind = choose_device(device)
    merged = resolve_precision(merged, kind)
    refuse_attention(merged.train.attention, kind)
    largest = ranks or ranks_available(kind) or cpu_cores()
    refuse_many_ranks(largest, "the world")
    config = merged.config(num_classes)
    refuse_unwritable(out)
    world = enter(largest if kind == "cpu" else 1, kind)

    import torch

    from vitpar.launch.process_group import meeting_place
    from vitpar.parallel.compiling import compiler_fault
    from vitpar.planner.measure.clock import Clock, Neighbours
    from vitpar.planner.measure.layer import Subject
    from vitpar.planner.measure.model import profile_model

    where = torch.device(kind)
    clock = Clock(where, Neighbours(world.rank, world.size, meeting_place(world)), seconds)
    wanted = merged.train.compile
    compiled = kind == "cuda" and compiler_fault(where) is None if wanted is None else wanted
    subject = Subject(config, merged.train.precision, largest, compiled, merged.train.attention)
    with _progress(shown=world.rank == 0 and not as_json) as progress:
        profile = profile_model(subject, where, clock, world.size, progress)
    if world.rank == 0:
        profile.save(out)
        typer.echo(profile.model_dump_json()) if as_json else show_model(profile, out)
    end(world)


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
