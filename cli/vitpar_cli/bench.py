"""`vitpar bench`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitpar.errors import RecipeError
from vitpar_cli import recipe_options as o
from vitpar_cli.world import choose_device, resolve, run_in_world

if TYPE_CHECKING:
    import torch

CLASSES = 10  # where no data says how many there are
USED = (
    *("model.…", "parallel.…", "communication.…", "loss_scale.…"),
    *(f"optimizer.{key}" for key in ("name", "implementation", "momentum", "nesterov", "ns_steps")),
    *(f"train.{key}" for key in ("batch_size", "precision", "reduce_dtype", "label_smoothing", "clip_grad_norm")),
    *(f"train.{key}" for key in ("ema_decay", "compile", "attention", "activation_memory_budget")),
    "faults.non_finite",
)
"""Settings that matter to a benchmark."""
USED_WITH_DATA = (
    *("augment.…", "stream.…", "train.seed"),
    *(f"data.{key}" for key in ("path", "crop_scale", "crop_ratio", "flip", "interpolation", "mean", "std")),
    *(f"data.{key}" for key in ("shuffle_window", "shuffle_block", "workers", "bad_sample")),
)
"""Further ones where data is read."""


def bench(
    mesh: o.Mesh = None,
    recipe: o.RecipeFile = None,
    data: o.DataDir = None,
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Read no data; so it is too where neither a recipe nor data are named."),
    ] = False,
    model: o.ModelName = None,
    num_classes: Annotated[
        int | None, typer.Option("--num-classes", min=2, help="Classes where no data is read.  \\[default: 10]")
    ] = None,
    batch_size: o.BatchSize = None,
    microbatches: o.Microbatches = None,
    microbatch_size: o.MicrobatchSize = None,
    schedule: o.Schedule = None,
    virtual_stages: o.VirtualStages = None,
    split: o.Split = None,
    precision: o.Precision = None,
    compile_blocks: o.Compile = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are timed together.")] = 10,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often so many steps are timed.")] = 5,
    warmup: Annotated[
        int | None,
        typer.Option("--warmup", min=1, help="Steps that do not count, at first.  \\[default: until they are steady]"),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="DIR", help="Write a trace of every rank there, and show the top kernels."),
    ] = None,
    device: o.DeviceName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    assignments: o.Assignments = None,
) -> None:
    """Measure the speed of training: images a second, MFU, memory, what input costs, and every phase of a step beside
    its limit.

    Runs the trainer's own steps on the recipe's data, and in turns with them on images that are there already. Nothing
    is learned and nothing is saved.

    Example: vitpar bench --mesh pp2xtp2xdp2 --recipe experiments/digits.toml
    """
    if synthetic and data is not None:
        raise RecipeError(f"both --synthetic and --data {data} are given: keep one")
    reads = not synthetic and (recipe is not None or data is not None)
    if reads and num_classes is not None:
        raise RecipeError(f"--num-classes {num_classes} changes nothing where the data says it: leave it out")
    o.refuse_idle(assignments, "a benchmark" if reads else "a benchmark without data", USED + USED_WITH_DATA * reads)
    merged = o.merged_recipe(
        recipe,
        data,
        assignments,
        parallel__mesh=mesh,
        model__name=model,
        train__steps=1,  # a length, which recipes need and a benchmark does not
        train__batch_size=batch_size,
        parallel__microbatches=microbatches,
        parallel__microbatch_size=microbatch_size,
        parallel__schedule=schedule,
        parallel__virtual_stages=virtual_stages,
        parallel__split=o.parse_split(split),
        train__precision=precision,
        train__compile=compile_blocks,
    )
    from vitpar.parallel.attention import refuse_attention
    from vitpar.training.input import open_split, transforms
    from vitpar.training.recipe.auto_precision import resolve_precision

    kind = choose_device(device)
    merged = resolve_precision(merged, kind)
    refuse_attention(merged.train.attention, kind)
    images = open_split(merged, "train") if reads else None
    config = merged.config(images.num_classes if images is not None else num_classes or CLASSES)
    chosen = merged.chosen(config, lambda plan: resolve(plan, kind))
    if images is not None:
        transforms(merged, config.image_size)  # refuses wrong settings before anything starts
    if profile is not None:
        _make(profile)

    def work(device: "torch.device") -> int:
        import torch.distributed as dist

        from vitpar.bench import Settings
        from vitpar.bench import bench as measure
        from vitpar.planner.out_of_memory import explain_memory
        from vitpar_cli.bench_view import Status, show

        settings = Settings(steps, repeats, warmup)
        memory = explain_memory(merged, config, chosen.plan, device)
        with memory, Status(shown=dist.get_rank() == 0) as status:
            found = measure(merged, config, chosen.plan, device, images, settings, traces=profile, told=status.tell)
        if dist.get_rank() == 0:
            for warning in filter(None, (chosen.because, *found.warnings)):
                typer.echo(f"warning: {warning}", err=True)
            typer.echo(json.dumps(found.to_json())) if as_json else show(found, profile)
        return 0

    run_in_world(chosen.plan, kind, work)


def _make(folder: Path) -> None:
    """The folder of the traces. Raises RecipeError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise RecipeError(f"cannot write traces into '{folder}' ({reason}): name a folder with --profile")
