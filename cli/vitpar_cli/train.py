"""`vitpar train`: train a Vision Transformer."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from vitpar.errors import DataError, RecipeError
from vitpar.text import either
from vitpar.training.recipe import read_recipe
from vitpar.training.recipe.sections import AUTO
from vitpar.training.tracking.tracked_run import TrackerName, refuse_missing
from vitpar.weights.hub import hub_name
from vitpar_cli import recipe_options as o
from vitpar_cli.automatic import AutoOptions, choose
from vitpar_cli.hub import local_weights
from vitpar_cli.streams import outlive_reader
from vitpar_cli.world import choose_device, run_in_world

if TYPE_CHECKING:
    import torch

SEARCHED = "Search of the plan, with --mesh auto"
"""Heading in `--help` of the options for --mesh auto."""


def train(
    mesh: Annotated[
        str | None,
        o.setting(
            "parallel.mesh",
            "--mesh",
            metavar="STRATEGY",
            help="Roles and degrees of the mesh's axes, such as pp2xtp2xdp2; by layers in quotes, as in "
            "'pp2: embed=fsdp4, \\*=tp2xfsdp2'; a plan.json; or auto: the fastest that fits into --memory.",
        ),
    ] = None,
    recipe: o.RecipeFile = None,
    data: o.DataDir = None,
    model: o.ModelName = None,
    task: o.TaskName = None,
    weights: Annotated[
        Path | None,
        o.setting(
            "model.weights",
            "--weights",
            to=str,
            metavar="DIR",
            help="Start from these parameters: weights of `vitpar checkpoint import` or of a run, a checkpoint, or "
            "hf:OWNER/NAME\\[@REVISION] on the Hugging Face hub. Without --model and --recipe they bring their recipe.",
        ),
    ] = None,
    epochs: o.Epochs = None,
    steps: Annotated[int | None, o.setting("train.steps", "--steps", min=1, help="Updates, instead of epochs.")] = None,
    batch_size: o.BatchSize = None,
    microbatches: o.Microbatches = None,
    microbatch_size: o.MicrobatchSize = None,
    schedule: o.Schedule = None,
    virtual_stages: o.VirtualStages = None,
    split: o.Split = None,
    precision: o.Precision = None,
    compile_blocks: o.Compile = None,
    device: o.DeviceName = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of this run.  \\[default: runs/DATE-…]")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="auto|PATH|never",
            help="Resume from the newest complete checkpoint of the run in PATH, or from the checkpoint PATH, with its "
            "recipe unless --recipe names another; auto: resume the run in --run-dir, or start it.",
        ),
    ] = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-change",
            metavar="KEY",
            help="A setting that may differ from the checkpoint's, or data; repeatable.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory limit per rank, such as 24GB.  \\[default: 90 % of a device]",
            rich_help_panel=SEARCHED,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=1, help="Number of ranks.  \\[default: GPUs or CPU cores]", rich_help_panel=SEARCHED
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="NAME", help="Plan from a data sheet, such as 8xH100.", rich_help_panel=SEARCHED
        ),
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            "--hardware",
            metavar="FILE",
            help="Hardware profile.  \\[default: hardware.json, or measured]",
            rich_help_panel=SEARCHED,
        ),
    ] = None,
    model_profile: Annotated[
        Path | None,
        typer.Option(
            "--model-profile",
            metavar="FILE",
            help="Model profile.  \\[default: model.json, or measured]",
            rich_help_panel=SEARCHED,
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        o.setting(
            "track.trackers",
            "--track",
            to=lambda names: tuple(names) or None,
            metavar="NAME",
            help=f"Tracker that gets what the run logs: {either(get_args(TrackerName))}; repeatable.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object instead of progress.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the merged recipe, the plan and the predicted memory; do not train."),
    ] = False,
    debug_checks: Annotated[
        bool,
        o.setting(
            "faults.debug_checks",
            "--debug-checks",
            to=lambda on: on or None,
            help="Compare parameters, gradients and the order of collectives over the ranks at every step (slow).",
        ),
    ] = False,
    assignments: o.Assignments = None,
) -> None:
    """Train a Vision Transformer under any mesh.

    Without a launcher it starts its own ranks; under torchrun, srun or mpirun it joins theirs. With --data and without
    --recipe, the defaults depend on the number and size of the training images (docs/defaults.md).

    Example: vitpar train --data data_shards/mine

    Example: vitpar train --mesh pp2xtp2xdp2 --recipe digits

    Example: vitpar train --mesh auto --memory 40GB --data data_shards/mine
    """
    given = o.checked_settings(train, locals())
    if not dry_run:
        outlive_reader()  # log.txt of the run has what it prints
    if resume in (None, "never") and weights is None and not allow_change:
        o.refuse_missing_data(recipe, given, assignments)
    from vitpar.training.saving.resume import counting_images, resumed, same_run

    resumed_run = resumed(resume, run_dir)
    if resumed_run.source is None and allow_change:
        raise RecipeError(f"--allow-change {allow_change[0]} does nothing without --resume: leave it out")
    run_dir = run_dir or resumed_run.run
    own_recipe = recipe is None and resumed_run.recipe is not None
    their_recipe = False
    if weights is not None and resumed_run.begins:
        weights = local_weights(weights)
        if not weights.is_dir():
            raise DataError(f"--weights '{weights}' does not exist: name a folder of weights, or hf:OWNER/NAME")
        given["model.weights"] = str(weights)
        if recipe is None and model is None and not own_recipe and (weights / "recipe.toml").is_file():
            recipe, their_recipe = weights / "recipe.toml", True
    elif weights is not None and hub_name(str(weights)) and resumed_run.recipe is not None:
        given["model.weights"] = read_recipe(resumed_run.recipe).model.weights  # they are in the checkpoint
    if own_recipe and mesh is None:
        given["parallel.mesh"] = resumed_run.mesh()
    # Another mesh replaces the complete plan of the resumed run, and the plan of the weights' run is not this one's.
    without = ("parallel",) * (mesh == AUTO)
    if their_recipe or (own_recipe and mesh is not None):
        without = ("parallel", "communication", *(["track"] if their_recipe else []))
    merged, images = o.training_recipe(
        resumed_run.recipe if own_recipe else recipe,
        given,
        assignments,
        without=without,
    )
    merged = counting_images(merged, resumed_run)
    refuse_missing(merged.track.trackers)
    merged = o.without_commands(merged, assignments) if own_recipe or their_recipe else merged
    from vitpar.training.begin import beginning
    from vitpar.training.events import SettingsOrigin
    from vitpar.training.input import open_data, transforms
    from vitpar.training.recipe.machine import on_device, refuse_huge_batch
    from vitpar.training.run_folder import check_run_folder

    device_type = choose_device(device)
    automatic = merged.train.precision == "auto"
    if resumed_run.recipe is not None:  # a resumed run keeps its precision
        merged = merged.with_precision(read_recipe(resumed_run.recipe).train.precision)
    train_set, _ = open_data(merged)
    from vitpar.tasks import LabelSet, task_of

    trained_task = task_of(merged, LabelSet.of(train_set))
    config = merged.config(trained_task.outputs)
    options = AutoOptions(memory, ranks, cluster, hardware, model_profile)
    searched = merged.parallel.mesh == AUTO
    if searched:
        merged, chosen, store = choose(
            on_device(merged, device_type), config, device_type, options, resumed_run.recipe, as_json
        )
    else:
        options.refuse_beside(merged.parallel.mesh)
        (merged, chosen), store = o.decide(merged, config, device_type), None
    plan = chosen.plan
    transforms(merged, config.image_size)  # refuses invalid settings before ranks start
    refuse_huge_batch(merged, config)
    if device_type == "cpu":
        from vitpar.launch import find_world
        from vitpar.planner.out_of_memory import refuse_impossible

        world = find_world()
        refuse_impossible(merged, config, plan, world.local_size if world else plan.world_size)
    if merged.model.weights is not None and resumed_run.begins:
        beginning(merged, config, trained_task, train_set)
    resuming = run_dir is not None and resumed_run.source is not None and same_run(run_dir, resumed_run.source)
    check_run_folder(run_dir, resuming)
    if dry_run:
        from vitpar_cli.dry_run import show_dry_run

        show_dry_run(merged, config, chosen, len(train_set), device_type, searched=searched, as_json=as_json)
        return

    def work(device: "torch.device") -> int:
        import torch.distributed as dist

        from vitpar.launch import find_world
        from vitpar.launch.stop_request import SAVED
        from vitpar.planner.out_of_memory import explain_memory, memory_warning
        from vitpar.training.events import Reporter
        from vitpar.training.faults.watchdog import Watchdog
        from vitpar.training.prepare import prepared
        from vitpar.training.trainer import Trainer
        from vitpar_cli.progress import ConsoleReporter

        reporter = Reporter() if as_json else ConsoleReporter()
        reasons = [chosen.because] if chosen.because else []
        # A plan that was searched is what the user asked for; a fallback is not.
        messages, notes = (reasons, list[str]()) if searched else ([], reasons)
        if dist.get_rank() == 0:
            world = find_world()
            warning = memory_warning(merged, config, plan, device, world.local_size if world else 1)
            notes += [warning] if warning else []
        memory = explain_memory(merged, config, plan, device)
        with memory, Watchdog(merged.faults.hang_minutes) as watchdog:
            run = prepared(
                merged,
                plan,
                device_type,
                run_dir=run_dir,
                resume=resumed_run.source,
                allow_change=allow_change or (),
                messages=messages,
                notes=notes,
                origin=SettingsOrigin(images, automatic),
            )
            trainer = Trainer(run, device, reporter=reporter, command=sys.argv, watchdog=watchdog)
            summary = trainer.run()
        if isinstance(reporter, ConsoleReporter):
            reporter.close()
        if as_json and trainer.rank == 0:
            typer.echo(json.dumps(summary))
        return SAVED if "stopped" in summary else 0

    run_in_world(chosen, device_type, work, saves=True, store=store)
