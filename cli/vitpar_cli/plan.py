"""`vitpar plan`: what a strategy makes of a model, before anything runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitpar.training.recipe.machine import resolve_precision
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import warn
from vitpar_cli.world import choose_device

if TYPE_CHECKING:
    from vitpar.models import ViTConfig
    from vitpar.planner.describe import PlanSummary
    from vitpar.strategy import Plan


def plan(
    strategy: Annotated[
        str | None,
        typer.Argument(
            metavar="STRATEGY",
            help="Roles and degrees, such as pp2xtp2xdp2, for all layers or for each, or a plan.json.  "
            "\\[default: the recipe's]",
        ),
    ] = None,
    recipe: o.RecipeFile = None,
    model: o.ModelName = None,
    num_classes: Annotated[int, typer.Option("--num-classes", min=1, help="Classes of the model's head.")] = 1000,
    batch_size: o.BatchSize = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", min=1, help="Ranks there will be; fills a degree left open.")
    ] = None,
    microbatches: o.Microbatches = None,
    microbatch_size: o.MicrobatchSize = None,
    schedule: o.Schedule = None,
    virtual_stages: o.VirtualStages = None,
    split: o.Split = None,
    precision: o.Precision = None,
    as_json: o.AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan as JSON.")] = None,
    assignments: o.Assignments = None,
) -> None:
    """Show what a strategy makes of a model: ranks, stages, memory, batch and communication.

    It needs no devices and no data. A strategy with spaces stands in quotes.

    Example: vitpar plan pp2xtp2xdp2 --model vit_base_patch16_224 --batch-size 256

    Example: vitpar plan "pp2: stem=fsdp4, 0-5=tp2xfsdp2, *=fsdp4+ckpt" --model vit_base_patch16_224
    """
    o.refuse_idle(assignments, "a plan")
    merged = o.merged_recipe(recipe, {**o.settings(plan, locals()), "parallel.mesh": strategy}, assignments)
    merged = resolve_precision(merged, choose_device(None))
    config = merged.config(num_classes)
    if world_size is None:
        made = merged.plan(config, _closed)
    else:
        chosen = merged.chosen(config, lambda plan: plan.resolve(world_size))
        made = chosen.plan
        warn(chosen.because)
    from vitpar.planner.describe import summarize
    from vitpar.strategy.plan_json import write_plan
    from vitpar.training.optim.optimizer import state_bytes, state_words
    from vitpar_cli.plan_view import show

    summary = summarize(config, made, merged.train.batch_size, state_bytes(merged))
    if out is not None:
        write_plan(out, made)
    if as_json:
        typer.echo(json.dumps(_to_json(config, made, merged.train.precision, summary)))
    else:
        show(config, made, merged.train.precision, summary, state_words(merged))
        if out is not None:
            typer.echo(f"\nplan written to {out}")


def _closed(plan: "Plan") -> "Plan":
    """The plan itself. Raises StrategyError where it has an open degree."""
    from vitpar.errors import StrategyError
    from vitpar.text import shown

    roles = [axis.role for strategy in plan.kinds for axis in strategy.axes if axis.degree is None]
    if plan.pp is None or roles:
        role = "pp" if plan.pp is None else roles[0]
        raise StrategyError(f"the degree of '{role}' in '{shown(plan)}' is open: give it a number, or --world-size N")
    return plan


def _to_json(config: "ViTConfig", plan: "Plan", precision: str, summary: "PlanSummary") -> dict[str, Any]:
    """All that is printed, as data. ranks: where every rank of the world stands; places, of a strategy: where every
    rank of a stage stands on its axes."""
    from vitpar.strategy import place_of_rank
    from vitpar.strategy.layout import place
    from vitpar.strategy.plan_json import plan_to_json
    from vitpar_cli.rank_grid import shown_axis

    found = {
        "model": config.name,
        "num_classes": config.num_classes,
        "strategy": str(plan),
        "world_size": plan.world_size,
        "precision": precision,
        "plan": plan_to_json(plan),
        **asdict(summary),
        "ranks": [
            dict(zip(("pp", "stage_rank"), place_of_rank(plan, rank), strict=True)) for rank in range(plan.world_size)
        ],
    }
    kinds = {str(kind): kind for kind in plan.kinds}
    for record in found["strategies"]:
        kind = kinds[record["strategy"]]
        record["places"] = [
            {shown_axis(kind, axis): index for axis, index in place(kind, rank).items()} for rank in range(kind.size)
        ]
    return found
