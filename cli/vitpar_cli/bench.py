"""`vitpar bench`: measure the speed of training."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vitpar.data.stream.stream_set import ImageSet
from vitpar.errors import RecipeError
from vitpar.launch.resources import choose_device
from vitpar.models import ModelConfig
from vitpar.planner.out_of_memory import explain_memory
from vitpar.recipe import Recipe
from vitpar.recipe.machine import choose_plan, on_device
from vitpar.recipe.recipe import Chosen
from vitpar.recipe.request import RecipeRequest, classes_of
from vitpar.tasks import Task, task_of
from vitpar.tasks.data import check_images, open_split, refuse_streamed_targets
from vitpar.training.prepare import refuse_misfits
from vitpar_cli import recipe_options as o
from vitpar_cli.bench_view import show
from vitpar_cli.outputs import Status, make_folder, print_json, warn
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
    length = steps, repeats, warmup
    run_in_world(
        *(chosen.plan.world_size, device_type, _bench),
        *(merged, config, trained, chosen, images, length, begun, profile, as_json),
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
