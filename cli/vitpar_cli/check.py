"""`vitpar check`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitpar.strategy import Plan
from vitpar.strategy.batch import smallest_microbatch
from vitpar.train.plan_choice import first_that_fits
from vitpar_cli import recipe_options as o
from vitpar_cli.world import choose_device, resolve, run_in_world

if TYPE_CHECKING:
    import torch

    from vitpar.train.check import CheckResult

TINY = "vit_nano_patch4_16"  # 8 blocks and 12 heads, so that most plans fit it
ROWS_SHOWN = 8
USED = (
    *("model.…", "parallel.…", "communication.…", "optimizer.implementation"),
    *(f"train.{key}" for key in ("batch_size", "seed", "precision", "reduce_dtype", "label_smoothing", "compile")),
    *("train.attention", "train.activation_memory_budget"),
)
"""Settings that matter to a check."""


def check(
    mesh: o.Mesh = None,
    recipe: o.RecipeFile = None,
    model: o.ModelName = None,
    num_classes: Annotated[int, typer.Option("--num-classes", min=2, help="Classes of the model's head.")] = 10,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", min=1, help="Images of a step over all ranks.  \\[default: 16 or the next that divides]"
        ),
    ] = None,
    microbatches: o.Microbatches = None,
    microbatch_size: o.MicrobatchSize = None,
    schedule: o.Schedule = None,
    virtual_stages: o.VirtualStages = None,
    split: o.Split = None,
    precision: o.Precision = None,
    compile_blocks: o.Compile = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            help="Largest relative error allowed.  \\[default: 1e-9 in fp64, 1e-4 in fp32, 0.15 in bf16, 0.1 in fp16]",
        ),
    ] = None,
    device: o.DeviceName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    assignments: o.Assignments = None,
) -> None:
    """Prove that a plan does not change the training.

    Builds the model under the plan and in one process, and compares on the same seed and data: the loss, every
    parameter's gradient and three SGD steps. Exits with 1 when an error is beyond the tolerance. The model is a tiny
    ViT unless --recipe or --model names another.

    Example: vitpar check --mesh pp2xtp2xdp2
    """
    o.refuse_idle(assignments, "a check", USED)
    merged = o.merged_recipe(
        recipe,
        None if recipe else Path("unused"),  # no data is read
        assignments,
        parallel__mesh=mesh,
        train__batch_size=batch_size,
        model__name=model or (None if recipe else TINY),
        train__steps=1 if recipe is None else None,
        parallel__microbatches=microbatches,
        parallel__microbatch_size=microbatch_size,
        parallel__schedule=schedule,
        parallel__virtual_stages=virtual_stages,
        parallel__split=o.parse_split(split),
        train__precision=precision,
        train__compile=compile_blocks,
    )
    from vitpar.parallel.attention import refuse_attention

    kind = choose_device(device)
    refuse_attention(merged.train.attention, kind)
    parts = first_that_fits(merged.requested_plans(), lambda plan: resolve(plan, kind)).plan
    named = batch_size or o.assigned(assignments, "train.batch_size")
    size = merged.train.batch_size if named else _batch_that_divides(parts)
    merged = merged.model_copy(update={"train": merged.train.model_copy(update={"batch_size": size})})
    config = merged.config(num_classes)
    chosen = merged.chosen(config, lambda plan: resolve(plan, kind))
    plan = chosen.plan

    def work(device: "torch.device") -> int:
        import torch.distributed as dist

        from vitpar.parallel.attention import choose_attention
        from vitpar.parallel.compiling import choose_compiling
        from vitpar.parallel.precision import precision as numbers
        from vitpar.train.check import check_plan

        t = merged.train
        choose_attention(t.attention, config, plan, size, numbers(t.precision), device)
        compiling = choose_compiling(t.compile, plan, t.precision, device)
        settings: dict[str, Any] = {
            "precision": t.precision,
            "reduce_dtype": t.reduce_dtype,
            "tolerance": tolerance,
            "seed": t.seed,
            "label_smoothing": t.label_smoothing,
            "compile_blocks": compiling.blocks,
            "activation_memory_budget": t.activation_memory_budget,
            "communication": merged.communication.used_by(plan, t.precision).settings(),
            "optimizer": merged.optimizer.implementation,
        }
        result = check_plan(config, plan, batch_size=size, device=device, **settings)
        if dist.get_rank() == 0:
            if chosen.because:
                typer.echo(f"warning: {chosen.because}", err=True)
            if compiling.because:
                typer.echo(f"warning: blocks are not compiled: {compiling.because}", err=True)
            typer.echo(json.dumps(result.to_json())) if as_json else _print(result)
        return 0 if result.passed else 1

    run_in_world(plan, kind, work)


def _batch_that_divides(plan: Plan) -> int:
    """The least batch of 16 or more images with two in every part of a micro-batch, and twice as many micro-batches as
    stages."""
    count = plan.microbatches or (2 * plan.num_stages if plan.num_stages > 1 else 1)
    size = plan.data_parallel * count * (plan.microbatch_size or 2 * smallest_microbatch(plan))
    return size * -(-16 // size)


def _print(result: "CheckResult") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"{result.plan} against one process: {result.model}, batch {result.batch_size}, {result.precision}"
    table = Table("quantity", "largest relative error", "magnitude", title=title, title_justify="left")
    losses = list(zip(result.losses, result.reference_losses, strict=True))
    for step, (got, expected) in enumerate(losses, start=1):
        table.add_row(f"loss of step {step}", f"{abs(got - expected) / abs(expected):.1e}", f"{expected:.6f}")
    for heading, group in (("gradient", result.gradients), ("after 3 steps", result.parameters)):
        table.add_section()
        worst = sorted(group, key=lambda c: -c.error)
        for row in worst[:ROWS_SHOWN]:
            table.add_row(f"{heading} {row.name}", f"{row.error:.1e}", f"{row.magnitude:.2e}")
        if len(worst) > ROWS_SHOWN:
            table.add_row(f"… {len(worst) - ROWS_SHOWN} more, all below", f"{worst[ROWS_SHOWN].error:.1e}", "")
    console.print(table)
    verdict = "[green]passed[/]" if result.passed else "[red]FAILED[/]"
    console.print(
        f"{verdict}: worst is {result.worst.name} with {result.worst.error:.1e}, allowed {result.tolerance:g}",
        highlight=False,
    )
