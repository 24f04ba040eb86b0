"""`vitpar eval`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitpar_cli import recipe_options as o
from vitpar_cli.world import choose_device, resolve, run_in_world

if TYPE_CHECKING:
    import torch

USED = (
    *(f"data.{key}" for key in ("path", "crop_pct", "interpolation", "mean", "std", "workers", "bad_sample")),
    *(f"stream.{key}" for key in ("train", "val", "samples", "val_samples", "classes", "label", "allow_pipe")),
    *(f"train.{key}" for key in ("batch_size", "precision", "compile", "attention")),
)
"""Settings that matter to an evaluation."""


def evaluate(
    checkpoint: Annotated[
        Path, typer.Option("--checkpoint", metavar="DIR", help="Saved weights: runs/…/weights, or a run's checkpoint.")
    ],
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Packed data.  \\[default: what it was trained on]")
    ] = None,
    split: Annotated[str, typer.Option("--data-split", help="Which part of the data: val or train.")] = "val",
    mesh: Annotated[str, typer.Option("--mesh", metavar="STRATEGY", help="Mesh to evaluate under.")] = "dp1",
    batch_size: o.BatchSize = None,
    precision: o.Precision = None,
    device: o.DeviceName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    assignments: o.Assignments = None,
) -> None:
    """Evaluate saved weights on a whole data set, under any mesh, whatever mesh trained them.

    Example: vitpar eval --checkpoint runs/20260102-…/weights --data data_shards/digits
    """
    from vitpar.errors import DataError
    from vitpar.parallel.attention import refuse_attention
    from vitpar.training.input import open_split, transforms
    from vitpar.training.recipe import read_recipe
    from vitpar.training.recipe.auto_precision import resolve_precision
    from vitpar.training.recipe.sections import ParallelSection
    from vitpar.weights.folder import RECIPE, read_config

    config = read_config(checkpoint)
    options = {"data.path": data and str(data), "train.batch_size": batch_size, "train.precision": precision}
    o.refuse_idle(assignments, "an evaluation", USED)
    saved = read_recipe(checkpoint / RECIPE, options, assignments or ())
    recipe = saved.model_copy(update={"parallel": ParallelSection(mesh=mesh)})
    recipe = o.without_commands(recipe, assignments)
    images = open_split(recipe, split)
    if images.num_classes != config.num_classes:
        raise DataError(
            f"'{images.place}' has {images.num_classes} classes but the weights in '{checkpoint}' "
            f"know {config.num_classes}: name the data they were trained on with --data"
        )
    kind = choose_device(device)
    # How fast the weights were trained is not theirs; to compile takes longer than most evaluations.
    plain = {"attention": "auto", "compile": False}
    ours = {key: value for key, value in plain.items() if not o.assigned(assignments, f"train.{key}")}
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update=ours)})
    recipe = resolve_precision(recipe, kind)
    refuse_attention(recipe.train.attention, kind)
    plan = recipe.plan(config, lambda plan: resolve(plan, kind))
    transforms(recipe, config.image_size)  # refuses wrong settings before anything starts

    def work(device: "torch.device") -> int:
        import torch.distributed as dist

        from vitpar.parallel import parallelize
        from vitpar.parallel.attention import choose_attention
        from vitpar.parallel.compiling import choose_compiling
        from vitpar.training.evaluate import evaluate
        from vitpar.training.input import Input
        from vitpar.weights.folder import load_weights

        train = recipe.train
        model = parallelize(
            config,
            plan,
            batch_size=train.batch_size,
            device=device,
            precision_name=train.precision,
            compile_blocks=choose_compiling(train.compile, plan, train.precision, device).blocks,
        )
        attention = choose_attention(train.attention, config, plan, train.batch_size, model.precision, device)
        load_weights(model, checkpoint)
        result = evaluate(model, Input(recipe, model), images)
        if dist.get_rank() == 0:
            for warning in filter(None, (attention.warning, result.warning)):
                typer.echo(f"warning: {warning}", err=True)
            if as_json:
                typer.echo(json.dumps(result.figures))
            else:
                typer.echo(
                    f"{result.samples} images of '{split}': top-1 {result.top1:.2%}, "
                    f"top-5 {result.top5:.2%}, loss {result.loss:.4f}"
                )
        return 0

    run_in_world(plan, kind, work)
