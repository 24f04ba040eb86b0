"""`vitpar plan`: what a strategy makes of a model, before anything runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitpar_cli import recipe_options as o

if TYPE_CHECKING:
    from rich.table import Table

    from vitpar.models import ViTConfig
    from vitpar.parallel.summary import PlanSummary
    from vitpar.strategy import Plan

USED = (
    *("model.…", "parallel.…", "optimizer.name", "optimizer.momentum"),
    *(f"train.{key}" for key in ("batch_size", "precision", "ema_decay")),
)
"""Settings that matter to a plan."""


def plan(
    strategy: Annotated[
        str | None,
        typer.Argument(metavar="STRATEGY", help="Roles and degrees, such as pp2xtp2xdp2.  \\[default: the recipe's]"),
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan as JSON.")] = None,
    assignments: o.Assignments = None,
) -> None:
    """Show what a strategy makes of a model: ranks, stages, memory, batch and communication.

    It needs no devices and no data.

    Example: vitpar plan pp2xtp2xdp2 --model vit_base_patch16_224 --batch-size 256
    """
    o.refuse_idle(assignments, "a plan", USED)
    merged = o.merged_recipe(
        recipe,
        None,
        assignments,
        parallel__mesh=strategy,
        model__name=model,
        train__batch_size=batch_size,
        parallel__microbatches=microbatches,
        parallel__microbatch_size=microbatch_size,
        parallel__schedule=schedule,
        parallel__virtual_stages=virtual_stages,
        parallel__split=o.parse_split(split),
        train__precision=precision,
    )
    config = merged.config(num_classes)
    made = merged.plan(config, lambda plan: _resolve(plan, world_size))
    from vitpar.parallel.summary import summarize
    from vitpar.strategy import write_plan
    from vitpar.train.state import state_bytes, state_words

    summary = summarize(config, made, merged.train.batch_size, state_bytes(merged))
    if out is not None:
        write_plan(out, made)
    if as_json:
        typer.echo(json.dumps(_to_json(config, made, summary)))
    else:
        _print(config, made, summary, state_words(merged))
        if out is not None:
            typer.echo(f"\nplan written to {out}")


def _resolve(plan: "Plan", world_size: int | None) -> "Plan":
    """The plan with its open degree filled. Raises StrategyError where there is one and nothing to fill it."""
    from vitpar.errors import StrategyError

    if world_size is not None:
        return plan.resolve(world_size)
    for axis in plan.axes:
        if axis.degree is None:
            raise StrategyError(f"the degree of '{axis.role}' in '{plan}' is open: give it a number, or --world-size N")
    return plan


def _to_json(config: "ViTConfig", plan: "Plan", summary: "PlanSummary") -> dict[str, Any]:
    from vitpar.strategy import plan_to_json, rank_grid

    return {
        "model": config.name,
        "num_classes": config.num_classes,
        "strategy": str(plan),
        "world_size": plan.world_size,
        "plan": plan_to_json(plan),
        **asdict(summary),
        "ranks": rank_grid(plan),
    }


def _print(config: "ViTConfig", plan: "Plan", summary: "PlanSummary", state: str) -> None:
    """state: what the memory column counts."""
    from rich.console import Console

    from vitpar.strategy.words import count
    from vitpar_cli.plan_words import batch_words, millions, pipeline_words
    from vitpar_cli.rank_grid import draw_ranks

    console = Console(highlight=False)
    console.print(f"[bold]{config.name}[/] under [bold]{plan}[/]")
    classes = f"{config.num_classes:,} class{'es' * (config.num_classes > 1)}"
    console.print(f"{millions(summary.parameters)} parameters, {classes}, {count(plan.world_size, 'rank')}\n")
    console.print(draw_ranks(plan, console.width), no_wrap=True)
    console.print()
    console.print(_stages(plan, summary))
    console.print(f"[dim]per rank; memory: {state}; no activations[/]\n")
    facts = _two_columns()
    facts.add_row("batch", batch_words(summary.batch))
    if plan.pipeline_degree > 1:
        facts.add_row("pipeline", pipeline_words(plan, summary.idle_share))
    for axis in summary.axes:
        facts.add_row(f"{axis.role}{axis.degree}", axis.communication)
    if plan.strategy.checkpoint:
        facts.add_row("+ckpt", "blocks keep their input alone and compute their forward again in backward")
    console.print(facts)


def _two_columns() -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table


def _stages(plan: "Plan", summary: "PlanSummary") -> "Table":
    """A row for every place on the pp axis, as in the rank grid."""
    from rich import box
    from rich.filesize import decimal
    from rich.table import Table

    from vitpar_cli.plan_words import layer_words, millions, percent
    from vitpar_cli.rank_grid import row_name

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("layers")
    for heading in ("FLOPs", "parameters", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for part in summary.pipeline:
        table.add_row(
            row_name(plan, part.pp),
            layer_words(part.layers),
            percent(part.flops_share),
            millions(part.parameters),
            decimal(part.state_bytes),
        )
    return table
