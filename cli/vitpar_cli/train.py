"""`vitpar train`: train a Vision Transformer."""

import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vitpar.launch import find_world
from vitpar.launch.stop_request import SAVED, stop_at_once
from vitpar.planner.out_of_memory import explain_memory, memory_warning
from vitpar.recipe.request import RecipeRequest
from vitpar.recipe.sections.input import TEXT
from vitpar.training.events import Reporter
from vitpar.training.prepare import Prepared, prepare
from vitpar_cli import recipe_options as o
from vitpar_cli.automatic import PlanChooser
from vitpar_cli.data_pack import packed
from vitpar_cli.outputs import local_weights, print_json
from vitpar_cli.profiled import MachineOptions, machine_options
from vitpar_cli.program import outlive_reader
from vitpar_cli.world import run_in_world

if TYPE_CHECKING:
    import torch

SEARCHED = "Search of the plan, with --mesh auto"
"""Heading in `--help` of the options for --mesh auto."""


@o.shared(
    asked=o.recipe(
        *("recipe", "assignments", "mesh", "model", "task", "weights", "epochs", "steps", "batch_size", *o.LAYOUT),
        *("precision", "compile_blocks", "track", "debug_checks"),
        mesh="Roles and degrees of the mesh's axes, such as pp2xtp2xdp2; by layers in quotes, as in 'pp2: "
        "embed=fsdp4, \\*=tp2xfsdp2'; a plan.json; or auto: the fastest that fits into --memory.",
    ),
    machine=machine_options(
        *("memory", "cluster", "hardware", "model_profile"),
        cluster="Plan from a data sheet, such as 8xH100.",
        hardware="Hardware profile.  \\[default: hardware.json, or measured]",
        model_profile="Model profile.  \\[default: model.json, or measured]",
    ).helped(SEARCHED),
)
def train(
    asked: RecipeRequest,
    machine: MachineOptions,
    ranks: int | None = typer.Option(
        None, "--ranks", min=1, help="Number of ranks.  \\[default: GPUs or CPU cores]", rich_help_panel=SEARCHED
    ),
    data: Path | None = typer.Option(
        None,
        "--data",
        metavar="DIR",
        help="Images or text: a folder made by `vitpar data pack`, or a folder of images, which is packed once.",
        rich_help_panel=o.PANELS["data"],
    ),
    device: o.DeviceName = None,
    run_dir: Path | None = typer.Option(
        None, "--run-dir", metavar="DIR", help="Folder of this run.  \\[default: runs/DATE-…]"
    ),
    resume: str | None = typer.Option(
        None,
        "--resume",
        metavar="auto|PATH|never",
        help="Resume from the newest complete checkpoint of the run in PATH, or from the checkpoint PATH, with its "
        "recipe unless --recipe names another; auto: resume the run in --run-dir, or start it.",
    ),
    allow_change: list[str] | None = typer.Option(
        None,
        "--allow-change",
        metavar="KEY",
        help="A setting that may differ from the checkpoint's, or data; repeatable.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as one JSON object instead of progress."),
    quiet: bool = typer.Option(False, "--quiet", help="Print messages, warnings and the result only."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print the merged recipe, the plan, and predicted memory and time; do not train."
    ),
) -> None:
    """Train a Vision Transformer under any mesh.

    Without a launcher it starts its own ranks; under torchrun, srun or mpirun it joins theirs. With --data and without
    --recipe, the defaults depend on the number and size of the training images (docs/defaults.md).

    Example: vitpar train --data photos

    Example: vitpar train --mesh pp2xtp2xdp2 --recipe digits

    Example: vitpar train --mesh auto --memory 40GB --data data_shards/mine
    """
    if data is not None:
        packs = find_world() is None and not dry_run and asked.given.get("task.name") not in TEXT
        asked |= {"data.path": str(packed(data) if packs else data)}
        asked.refuse_early()
    if not dry_run:
        stop_at_once()
        outlive_reader()  # log.txt of the run has what it prints
    plans = PlanChooser(machine, ranks, quiet=as_json)
    run = prepare(
        asked,
        device,
        run_dir=run_dir,
        resume=resume,
        allow_change=allow_change or (),
        choose=plans,
        fetch=local_weights,
    )
    if dry_run:
        from vitpar_cli.dry_run import show_dry_run

        show_dry_run(run, as_json=as_json)
    else:
        if run.recipe.faults.debug_checks:
            os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"  # `join` reads it
        ranks, where = run.plan.world_size, run.device_type
        run_in_world(ranks, where, _train, run, as_json, quiet, sys.argv, saves=True, store=plans.store)


def _train(device: "torch.device", run: Prepared, as_json: bool, quiet: bool, command: list[str]) -> int:
    """Train the rank of `device`, and return the exit code."""
    import torch.distributed as dist

    from vitpar.training.faults.watchdog import Watchdog
    from vitpar.training.trainer import Trainer
    from vitpar_cli.progress import ConsoleReporter

    reporter = Reporter() if as_json or dist.get_rank() else ConsoleReporter(quiet=quiet)
    facts = run.recipe, run.config, run.plan, device
    if dist.get_rank() == 0:
        world = find_world()
        warning = memory_warning(*facts, world.local_size if world else 1)
        run = replace(run, warnings=[*run.warnings, warning] if warning else run.warnings)
    with explain_memory(*facts), closing(reporter), Watchdog(run.recipe.faults.hang_minutes) as watchdog:
        trainer = Trainer(run, device, reporter=reporter, command=command, watchdog=watchdog)
        summary = trainer.run()
    if as_json and trainer.rank == 0:
        print_json(summary)
    return SAVED if "stopped" in summary else 0
