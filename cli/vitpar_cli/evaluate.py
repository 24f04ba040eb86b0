"""`vitpar eval`: evaluate saved weights."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import warn
from vitpar_cli.world import choose_device, run_in_world

if TYPE_CHECKING:
    import torch


def evaluate(
    checkpoint: Annotated[
        Path,
        typer.Option("--checkpoint", metavar="DIR", help="A run, saved weights or a checkpoint."),
    ],
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
    from vitpar.errors import DataError

    if not checkpoint.is_dir():  # before torch is imported, which takes seconds
        raise DataError(f"'{checkpoint}' holds no weights (no such folder): give a run such as runs/mine")
    checkpoint = _weights_of(checkpoint)
    from vitpar.training.input import open_split, transforms
    from vitpar.training.recipe import read_recipe
    from vitpar.training.recipe.sections import CommunicationSection, ParallelSection
    from vitpar.weights.folder import RECIPE, read_config

    config = read_config(checkpoint)
    o.refuse_idle(assignments, "an evaluation")
    saved = read_recipe(checkpoint / RECIPE, given, assignments or ())
    recipe = saved.model_copy(update={"parallel": ParallelSection(mesh=mesh), "communication": CommunicationSection()})
    recipe = o.without_commands(recipe, assignments)
    images = open_split(recipe, split)
    if images.num_classes != config.num_classes:
        raise DataError(
            f"'{images.place}' has {images.num_classes} classes but the weights in '{checkpoint}' "
            f"have {config.num_classes}: give the data they were trained on with --data"
        )
    kind = choose_device(device)
    # Settings for speed in training are not part of the weights, and compiling takes longer than most evaluations.
    plain = {"attention": "auto", "compile": False}
    ours = {key: value for key, value in plain.items() if not o.assigned(assignments, f"train.{key}")}
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update=ours)})
    recipe, chosen = o.decide(recipe, config, kind)
    plan = chosen.plan
    transforms(recipe, config.image_size)  # refuses invalid settings before ranks start

    def work(device: "torch.device") -> int:
        import torch.distributed as dist

        from vitpar.parallel import Execution, parallelize
        from vitpar.parallel.attention import choose_attention
        from vitpar.parallel.compiling import choose_compiling
        from vitpar.training.evaluate import evaluate
        from vitpar.training.input import Input
        from vitpar.weights.folder import load_weights

        train = recipe.train
        compiled = choose_compiling(train.compile, plan, train.precision, device).blocks
        execution = Execution(train.batch_size, train.precision, compile=compiled)
        model = parallelize(config, plan, execution, device)
        attention = choose_attention(train.attention, config, plan, train.batch_size, model.precision, device)
        load_weights(model, checkpoint)
        result = evaluate(model, Input(recipe, model), images)
        if dist.get_rank() == 0:
            warn(attention.warning, result.warning)
            if as_json:
                typer.echo(json.dumps(result.figures))
            else:
                typer.echo(
                    f"{result.samples} images of '{split}': top-1 {result.top1:.2%}, "
                    f"top-5 {result.top5:.2%}, loss {result.loss:.4f}"
                )
        return 0

    run_in_world(chosen, kind, work)


def _weights_of(path: Path) -> Path:
    """Return the folder to read weights from: `path` or, if that is a run, its weights or its newest checkpoint."""
    from vitpar.training.saving.resume import checkpoints_of, is_checkpoint
    from vitpar.weights.folder import CONFIG

    if (path / CONFIG).exists() or is_checkpoint(path):
        return path
    if (path / "weights").is_dir():
        return path / "weights"
    there = checkpoints_of(path)
    return there.path(there.steps()[-1]) if there.steps() else path
