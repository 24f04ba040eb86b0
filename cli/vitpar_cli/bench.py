"""`vitpar bench`: measure the speed of training, and print what limits it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitpar.data.stream.stream_set import ImageSet
from vitpar.errors import RecipeError
from vitpar.launch.resources import choose_device
from vitpar.models import ModelConfig
from vitpar.planner.cost.elements import layer_parameters
from vitpar.planner.out_of_memory import explain_memory
from vitpar.recipe import Recipe
from vitpar.recipe.machine import choose_plan, on_device
from vitpar.recipe.recipe import Chosen
from vitpar.recipe.request import RecipeRequest, classes_of
from vitpar.strategy import Plan
from vitpar.tasks import Task, task_of
from vitpar.tasks.data import check_images, open_split, refuse_streamed_targets
from vitpar.text import count, size
from vitpar.training.prepare import refuse_misfits
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import Status, data_table, facts_table, make_folder, print_json, warn
from vitpar_cli.plan_view import batch_rows, millions, percent
from vitpar_cli.world import run_in_world

if TYPE_CHECKING:
    import torch

CLASSES = 10
"""Default number of classes if no data is read."""


@o.shared(
    asked=o.recipe(
        *("recipe", "assignments", "mesh", "model", "task", "data", "batch_size", *o.LAYOUT),
        *("precision", "compile_blocks"),
    )
)
def bench(
    asked: RecipeRequest,
    synthetic: bool = typer.Option(
        False, "--synthetic", help="Use random samples.  \\[default: without --recipe and --data]"
    ),
    num_classes: int | None = typer.Option(
        None, "--num-classes", min=2, help="Number of classes without data.  \\[default: 10]"
    ),
    steps: int = typer.Option(10, "--steps", min=1, help="Steps per repeat."),
    repeats: int = typer.Option(5, "--repeats", min=1, help="Timed repeats of --steps steps."),
    warmup: int | None = typer.Option(
        None, "--warmup", min=1, help="Untimed steps at the start.  \\[default: until step times are steady]"
    ),
    profile: Path | None = typer.Option(
        None, "--profile", metavar="DIR", help="Write a trace of every rank to DIR, and show the top kernels."
    ),
    device: o.DeviceName = None,
    as_json: o.AsJson = False,
) -> None:
    """Measure the speed of training: samples per second, MFU, memory, the cost of input, and each phase of a step.

    Runs the trainer's own steps on the recipe's data, alternating with steps on samples that are already on the device.
    Compares the phases of a step with their limits. Nothing is learned or saved.

    Example: vitpar bench --mesh pp2xtp2xdp2 --recipe digits
    """
    begun = time.time()
    data = asked.given.get("data.path")
    if synthetic and data is not None:
        raise RecipeError(f"both --synthetic and --data {data} are given: keep one")
    reads = not synthetic and (asked.path is not None or data is not None)
    if reads and num_classes is not None:
        raise RecipeError(
            f"--num-classes {num_classes} does nothing with data, which has its own classes: leave it out"
        )
    # A recipe must have a length, although a benchmark does not use it.
    asked |= {"train.steps": 1}
    asked.refuse_idle("a benchmark" if reads else "a benchmark without data")
    device_type = choose_device(device)
    merged = on_device(asked.read(), device_type)
    images = open_split(merged, "train") if reads else None
    if images is None:
        usual = merged.config(CLASSES)  # a model of text has its own vocabulary and length
        trained = task_of(merged, classes_of(merged, num_classes, usual.num_classes)).filling(usual)
    else:
        trained = task_of(merged, images)
    config = merged.config(trained.outputs, trained.model_options)
    trained.refuse_model(config)
    if images is not None and trained.INPUT == "images":
        check_images(merged, config.image_size, images)
    chosen = choose_plan(merged, config, device_type)
    refuse_misfits(trained, merged, config, chosen.plan, images)
    if images is not None:
        refuse_streamed_targets(merged, trained, config, chosen.plan)
    if profile is not None:
        make_folder(profile, "give --profile a writable folder")
    run_in_world(
        *(chosen.plan.world_size, device_type, _bench),
        *(merged, config, trained, chosen, images, (steps, repeats, warmup), begun, profile, as_json),
    )


def _bench(
    device: "torch.device",
    recipe: Recipe,
    config: ModelConfig,
    task: Task,
    chosen: Chosen,
    images: ImageSet | None,
    length: tuple[int, int, int | None],
    begun: float,
    traces: Path | None,
    as_json: bool,
) -> int:
    """Run the benchmark on the rank of `device`, and return the exit code.

    length: fields of ``vitpar.bench.Settings``.
    begun: when the command began, in seconds since the epoch.
    """
    import torch.distributed as dist

    from vitpar.bench import Settings
    from vitpar.bench import bench as measure

    facts = recipe, config, chosen.plan, device
    with explain_memory(*facts), Status(shown=dist.get_rank() == 0) as status:
        benchmark = measure(
            *facts, images, Settings(*length), task=task, begun=begun, traces=traces, report=status.tell
        )
    if dist.get_rank() == 0:
        warn(chosen.because, *benchmark["warnings"])
        print_json(benchmark) if as_json else show(benchmark, config, chosen.plan, traces)
    return 0


Numbers = dict[str, Any]
"""Part of a result of ``vitpar.bench.bench``."""
PLAIN_WIDTH = 100
"""Width of the output in columns if there is no terminal."""
NAMES = 10
"""Columns of the names of values."""
KERNELS = 12
"""Maximum number of kernels that are shown."""
FIGURES = 54
"""Columns of the table of kernels other than the name."""
SHORT = 1e-5
"""Seconds up to which a phase counts as empty, so that its share of the limit is meaningless."""


def show(benchmark: Numbers, config: ModelConfig, plan: Plan, traces: Path | None) -> None:
    """Print the setup, the result, the phases, and the kernels if they were recorded.

    benchmark: of the model `config` under `plan`.
    traces: folder of the traces.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    for rows in (_ran(benchmark, config, plan), _reached(benchmark, config.sample)):
        console.print(facts_table(rows, NAMES))
        console.print()
    console.print(_phases(benchmark))
    if benchmark["kernels"] is not None:
        console.print(_kernels(benchmark["kernels"], benchmark["device"], console.width))
        console.print(
            Text(f"traces      {traces}/rank_*.json, for chrome://tracing or ui.perfetto.dev"), soft_wrap=True
        )


def _ran(benchmark: Numbers, config: ModelConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield names and values of the benchmark's setup."""
    parameters = sum(layer_parameters(config, Plan()).values())
    flops = f"{_short(config.flops)}FLOP per {config.sample} and step"
    yield "model", f"{config.name}, {millions(parameters)} parameters, {flops}"
    yield "mesh", f"{plan} on {count(plan.world_size, 'rank')} of {benchmark['device']}, {benchmark['device_name']}"
    yield from batch_rows(plan, benchmark["batch_size"], config.sample)
    attention = f", attention by {benchmark['attention']}" if benchmark["attention"] else ""
    yield "precision", benchmark["precision"] + (", blocks compiled" if benchmark["compile"] else "") + attention
    data, warm = benchmark["data"], benchmark["warm_up"]
    yield "input", data["name"] if data else f"synthetic: random {config.sample}s on the device"
    steady = "" if warm["steady"] else "; not steady yet"
    yield "warm-up", f"{count(warm['steps'], 'step')}{steady}"
    parts = (f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in benchmark["start_seconds"].items())
    yield "start", ", ".join(parts)


def _reached(benchmark: Numbers, sample: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of the result."""
    rates, seconds = benchmark["rates"], benchmark["step_seconds"]
    how = f"{count(len(seconds['repeats']), 'repeat')} of {count(benchmark['steps'], 'step')}"
    yield "step", f"{_ms(seconds)} ms, mean ± deviation of {how}"
    yield "speed", f"{_spread(benchmark['images_per_second'], 1.0)} {sample}s/s"
    if benchmark["mfu"] is not None:
        yield "MFU", f"{percent(benchmark['mfu'])} of the data sheet's {_short(rates['peak'])}FLOP/s per rank"
    measured = f"{_short(rates['matmul'])}FLOP/s per rank, the measured rate of matrix products of these shapes"
    yield "products", f"{percent(benchmark['matmul_share'])} of {measured}"
    yield "memory", f"{size(benchmark['memory_bytes'])} on the fullest rank"
    if data := benchmark["data"]:
        synthetic = data["synthetic_step_seconds"]
        share = _spread(data["share"], 100.0, 1)
        yield "data share", f"{share} % of a step; with synthetic input a step takes {_ms(synthetic)} ms"
        if prepared := data["images_per_second_prepared"]:
            takes = benchmark["batch_size"] / synthetic["mean"]
            yield "images", f"the model takes {takes:,.0f}/s, the CPUs prepare {prepared:,.0f}/s"


def _phases(benchmark: Numbers) -> Table:
    whole, between = benchmark["phased_step_seconds"]["mean"], benchmark["between_seconds"]
    table = data_table("phase", numbers=("ms", "share", "slowest", "limit", "of limit"))
    table.columns[0].no_wrap = True
    for phase in benchmark["phases"]:
        mean, limit = phase["seconds"]["mean"], phase["limit_seconds"]
        table.add_row(
            phase["name"],
            _ms(phase["seconds"]),
            percent(mean / whole),
            _milliseconds(phase["slowest_rank_seconds"]),
            "" if limit is None else _milliseconds(limit),
            percent(phase["limit_share"]) if limit is not None and mean > SHORT else "",
        )
    table.add_row("between phases", _milliseconds(between), percent(between / whole))
    table.add_section()
    table.add_row("step, timed by phase", _ms(benchmark["phased_step_seconds"]))
    return table


def _kernels(kernels: list[Numbers], device: str, width: int) -> Table:
    kind = "kernel" if device == "cuda" else "operator"
    table = data_table(kind, numbers=("ms", "share", "calls", "FLOP/s", "of limit"))
    table.columns[0].no_wrap = True
    room = max(10, width - FIGURES)
    for kernel in kernels[:KERNELS]:
        name, flops = kernel["name"], kernel["flops"]
        table.add_row(
            name if len(name) <= room else f"{name[: room - 1]}…",
            _milliseconds(kernel["seconds"]),
            percent(kernel["share"]),
            f"{kernel['calls']:,.0f}",
            "" if flops is None else _short(flops / kernel["seconds"]),
            "" if flops is None else percent(kernel["limit_share"]),
        )
    rest = kernels[KERNELS:]
    if rest:
        seconds, share = (sum(kernel[key] for kernel in rest) for key in ("seconds", "share"))
        table.add_row(f"… {len(rest)} more", _milliseconds(seconds), percent(share))
    return table


def _ms(seconds: Numbers) -> str:
    digits = _digits(seconds["mean"])
    return f"{seconds['mean'] * 1e3:,.{digits}f} ± {seconds['deviation'] * 1e3:,.{digits}f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.{_digits(seconds)}f}"


def _digits(seconds: float) -> int:
    return 2 if abs(seconds) < 0.1 else 1 if abs(seconds) < 1 else 0


def _spread(values: Numbers, factor: float, digits: int | None = None) -> str:
    mean, deviation = values["mean"] * factor, values["deviation"] * factor
    digits = (0 if mean >= 100 else 1) if digits is None else digits
    return f"{mean:,.{digits}f} ± {deviation:,.{digits}f}"


def _short(number: float) -> str:
    """Return a number with a metric prefix: 12.3e9 becomes `12.3 G`."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number:.3g} "
