"""`vitpar eval`: evaluate saved weights."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import warn
from vitpar_cli.saved_model import CheckpointDir, saved_model
from vitpar_cli.world import run_in_world

if TYPE_CHECKING:
    import torch


def evaluate(
    checkpoint: CheckpointDir,
    data: Annotated[
        Path | None,
        o.setting(
            "data.path", "--data", to=str, metavar="DIR", help="Packed data.  \\[default: what it was trained on]"
        ),
    ] = None,
    split: Annotated[str, typer.Option("--data-split", help="Split to evaluate: val or train.")] = "val",
    mesh: Annotated[str, typer.Option("--mesh", metavar="STRATEGY", help="Mesh to evaluate under.")] = "dp1",
    batch_size: o.BatchSize = None,
    precision: o.Precision = None,
    device: o.DeviceName = None,
    model: o.OwnModel = None,
    as_json: o.AsJson = False,
    assignments: o.Assignments = None,
) -> None:
    """Evaluate saved weights on a complete split of a data set, under any mesh, independent of the training mesh.

    If the path is a run, evaluates its final weights or, if the run has not ended, its newest checkpoint.

    Example: vitpar eval --checkpoint runs/20260102-… --data data_shards/digits
    """
    given = o.checked_settings(evaluate, locals())
    saved = saved_model(checkpoint, given, assignments, doing="an evaluation", mesh=mesh)
    from vitpar.errors import DataError
    from vitpar.training.input import open_split

    images = open_split(saved.recipe, split)
    if images.num_classes != saved.config.num_classes:
        raise DataError(
            f"'{images.place}' has {images.num_classes} classes but the weights in '{saved.folder}' "
            f"have {saved.config.num_classes}: give the data they were trained on with --data"
        )
    planned = saved.planned(device)

    def work(device: "torch.device") -> int:
        import torch.distributed as dist

        from vitpar.training.evaluate import evaluate
        from vitpar.training.input import Input

        model, warning = planned.built(device)
        result = evaluate(model, Input(planned.recipe, model), images)
        if dist.get_rank() == 0:
            warn(warning, result.warning)
            if as_json:
                typer.echo(json.dumps(result.figures))
            else:
                typer.echo(
                    f"{result.samples} images of '{split}': top-1 {result.top1:.2%}, "
                    f"top-5 {result.top5:.2%}, loss {result.loss:.4f}"
                )
        return 0

    run_in_world(planned.chosen, planned.kind, work)
