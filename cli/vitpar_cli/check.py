"""`vitpar check`: compare training under a plan with training in one process."""

from typing import TYPE_CHECKING

import typer

from vitpar.launch.resources import choose_device
from vitpar.models import ModelConfig
from vitpar.recipe import Recipe
from vitpar.recipe.machine import choose_plan, on_device, resolve
from vitpar.recipe.recipe import Chosen, first_that_fits
from vitpar.recipe.request import RecipeRequest, classes_of
from vitpar.strategy import Plan
from vitpar.strategy.batch import schedule_objection, smallest_microbatch
from vitpar.tasks import Task, task_class, task_of
from vitpar.training.prepare import refuse_misfits
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import data_table, print_json, warn
from vitpar_cli.world import run_in_world

if TYPE_CHECKING:
    import torch

    from vitpar.check import CheckResult
CLASSES = 10
"""Default number of classes of images."""
VOCABULARY = 64
"""Default number of tokens in the vocabulary of text."""


@o.shared(
    asked=o.recipe(
        *("recipe", "assignments", "mesh", "model", "task", "batch_size", *o.LAYOUT, "precision", "compile_blocks"),
        recipe="TOML recipe whose training is checked.  \\[default: a tiny ViT with all features on]",
        batch_size="Images per step over all ranks.  \\[default: the smallest from 16 that the plan allows]",
    )
)
def check(
    asked: RecipeRequest,
    num_classes: int | None = typer.Option(
        None,
        "--num-classes",
        min=2,
        help="Classes of the model; tokens of the vocabulary for mlm and span.  "
        f"\\[default: the data's, or {CLASSES}, or {VOCABULARY} tokens]",
    ),
    tolerance: float | None = typer.Option(
        None, "--tolerance", help="Allowed relative error.  \\[default: a multiple of each tensor's rounding noise]"
    ),
    device: o.DeviceName = None,
    as_json: o.AsJson = False,
) -> None:
    """Prove that a plan does not change the training.

    Trains the model under the plan and in one process on the same random images or text. Compares losses, every
    parameter's gradient, two steps of SGD, and two steps of the recipe: its optimizer, clipping, averaged weights,
    label smoothing, mixup, CutMix and repeated samples. A tensor may differ by a few times the rounding noise that it
    has in one process. Exits with 1 if anything differs by more. Both sides run the same layers: a fault of a layer
    itself is found by the tests against timm and transformers, not here. Without --recipe the model is a tiny ViT
    with drop-path and dropout, and all of these features are on.

    Example: vitpar check --mesh pp2xtp2xdp2
    """
    asked.refuse_idle("a check")
    from vitpar.check import recipe_to_check

    merged = asked.read() if asked.path else recipe_to_check(asked.given, asked.assignments)
    device_type = choose_device(device)
    parts = first_that_fits(merged.requested_plans(), lambda plan: resolve(plan, device_type)).plan
    named = asked.given.get("train.batch_size") or "train.batch_size" in asked.assigned
    size = merged.train.batch_size if named else _batch_that_divides(parts)
    merged = merged.updated(train={"batch_size": size})
    merged = on_device(merged, device_type)
    usual = CLASSES if task_class(merged).INPUT == "images" else VOCABULARY
    checked = task_of(merged, classes_of(merged, num_classes, usual))
    config = merged.config(checked.outputs, checked.model_options)
    checked.refuse_model(config)
    chosen = choose_plan(merged, config, device_type)
    refuse_misfits(checked, merged, config, chosen.plan, None)
    run_in_world(chosen.plan.world_size, device_type, _check, merged, config, checked, chosen, tolerance, as_json)


def _check(
    device: "torch.device",
    recipe: Recipe,
    config: ModelConfig,
    task: Task,
    chosen: Chosen,
    tolerance: float | None,
    as_json: bool,
) -> int:
    """Run the check on the rank of `device`, and return the exit code."""
    import torch.distributed as dist

    from vitpar.check import check_plan
    from vitpar.parallel.attention import choose_attention
    from vitpar.parallel.compiling import choose_compiling
    from vitpar.parallel.precision import resolve_precision

    t, plan = recipe.train, chosen.plan
    choose_attention(t.attention, config, plan, t.batch_size, resolve_precision(t.precision), device)
    compiling = choose_compiling(t.compile, plan, t.precision, device)
    result = check_plan(recipe, config, plan, device, task, tolerance=tolerance)
    if dist.get_rank() == 0:
        warn(chosen.because, compiling.because and f"blocks are not compiled: {compiling.because}")
        print_json(result.to_json()) if as_json else _print(result)
    return 0 if result.passed else 1


def _batch_that_divides(plan: Plan) -> int:
    """Return the smallest batch size of 16 or more that the plan divides.

    Unless the plan says otherwise, a pipeline has twice as many micro-batches as stages, and each has twice the
    smallest size that the plan allows.
    """
    count = plan.microbatches or 1
    if plan.num_stages > 1 and (plan.microbatches is None or schedule_objection(plan, plan.microbatches)):
        count = 2 * plan.num_stages
    size = plan.data_parallel * count * (plan.microbatch_size or 2 * smallest_microbatch(plan))
    return size * -(-16 // size)


def _print(result: "CheckResult") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    title = f"{result.plan} against one process: {result.model}, batch {result.batch_size}, {result.precision}"
    table = data_table("compared", "error", "allowed", "of", "magnitude", title=title)
    for quantity, group in result.quantities.items():
        table.add_section()
        most = 1 if result.passed else 4
        for row in group[:most]:
            table.add_row(row.name, f"{row.error:.1e}", f"{row.allowed:.1e}", row.metric, f"{row.magnitude:.2e}")
        if len(group) > most:
            table.add_row(f"… {len(group) - most} more {quantity}s", "", "", "", "")
    console.print(table)
    console.print("the closest to their limits; --json prints all", style="dim")
    gradients = result.quantities["gradient"]
    blurred = sum(row.resolution > 0.01 for row in gradients)
    seen = f"an error of 1 % would show in {len(gradients) - blurred} of {len(gradients)} gradients"
    console.print(f"{seen}; not checked: {result.unchecked}")
    verdict = "[green]passed[/]" if result.passed else "[red]FAILED[/]"
    worst = result.worst
    console.print(
        f"{verdict}: closest to its limit is {worst.name}, error {worst.error:.1e} of {worst.allowed:.1e} allowed",
    )
