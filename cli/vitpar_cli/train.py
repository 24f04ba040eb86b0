"""`vitpar train`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitpar_cli import recipe_options as o
from vitpar_cli.world import choose_device, resolve, run_in_world

if TYPE_CHECKING:
    import torch


def train(
    mesh: o.Mesh = None,
    recipe: o.RecipeFile = None,
    data: o.DataDir = None,
    model: o.ModelName = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the training set.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Updates, instead of epochs.")] = None,
    batch_size: o.BatchSize = None,
    microbatches: o.Microbatches = None,
    microbatch_size: o.MicrobatchSize = None,
    schedule: o.Schedule = None,
    virtual_stages: o.VirtualStages = None,
    split: o.Split = None,
    precision: o.Precision = None,
    compile_blocks: Annotated[
        bool, typer.Option("--compile", help="Compile each block (slow to start, faster steps).")
    ] = False,
    device: o.DeviceName = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of this run.  \\[default: runs/DATE-…]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object instead of progress.")
    ] = False,
    assignments: o.Assignments = None,
) -> None:
    """Train a Vision Transformer under any mesh.

    Without a launcher it starts its own workers; under torchrun, srun or mpirun it joins them.

    Example: vitpar train --mesh pp2xtp2xdp2 --recipe experiments/digits.toml
    """
    merged = o.merged_recipe(
        recipe,
        data,
        assignments,
        parallel__mesh=mesh,
        model__name=model,
        train__epochs=epochs,
        train__steps=steps,
        train__batch_size=batch_size,
        parallel__microbatches=microbatches,
        parallel__microbatch_size=microbatch_size,
        parallel__schedule=schedule,
        parallel__virtual_stages=virtual_stages,
        parallel__split=o.parse_split(split),
        train__precision=precision,
        train__compile=compile_blocks or None,
    )
    from vitpar.train.input import open_data, transforms
    from vitpar.train.run_folder import check_run_folder

    kind = choose_device(device)
    train_set, _ = open_data(merged)
    config = merged.config(len(train_set.classes))
    plan = merged.plan(config, lambda plan: resolve(plan, kind))
    transforms(merged, config.image_size)  # refuses wrong settings before anything starts
    check_run_folder(run_dir)

    def work(device: "torch.device") -> int:
        from vitpar.train.events import Silent
        from vitpar.train.trainer import Trainer
        from vitpar_cli.progress import ConsoleReporter

        reporter = Silent() if as_json else ConsoleReporter()
        trainer = Trainer(merged, plan, device, reporter=reporter, run_dir=run_dir, command=sys.argv)
        summary = trainer.run()
        if as_json and trainer.rank == 0:
            typer.echo(json.dumps(summary))
        return 0

    run_in_world(plan, kind, work)
