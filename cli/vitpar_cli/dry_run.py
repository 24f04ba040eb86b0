"""Output of `vitpar train --dry-run`: the merged recipe, the plan and the predicted memory."""

import json
from typing import TYPE_CHECKING

import torch
import typer

from vitpar.launch import find_world
from vitpar.launch.world import Device
from vitpar.planner.describe import summarize
from vitpar.planner.out_of_memory import estimate_memory, memory_warning, memory_words
from vitpar.strategy.plan_json import plan_to_json
from vitpar.training.optim.optimizer import frozen_bytes, moments, state_bytes, state_words
from vitpar_cli.outputs import warn
from vitpar_cli.plan_view import show

if TYPE_CHECKING:
    from vitpar.models.config import ModelConfig
    from vitpar.strategy import Plan
    from vitpar.training.recipe import Recipe


def show_dry_run(recipe: "Recipe", config: "ModelConfig", plan: "Plan", kind: Device, as_json: bool) -> None:
    """Print what a run would do. Of the ranks of a launcher only rank 0 prints.

    recipe: with all settings resolved.

    Raises PlannerError for a plan whose memory cannot be predicted.
    """
    world = find_world()
    if world is not None and world.rank > 0:
        return
    train = recipe.train
    frozen = recipe.frozen(config)
    memory = estimate_memory(config, plan, train.batch_size, train.precision, moments(recipe), frozen)
    fullest = max(memory, key=lambda one: one.total)
    if as_json:
        found = {
            "recipe": recipe.to_toml(),
            "plan": plan_to_json(plan),
            "predicted_memory_bytes": round(fullest.total),
        }
        typer.echo(json.dumps(found))
        return
    typer.echo(recipe.to_toml())
    summary = summarize(config, plan, train.batch_size, state_bytes(recipe), frozen_bytes(recipe, config))
    show(config, plan, train.precision, summary, state_words(recipe))
    typer.echo(f"\n{memory_words(fullest)} on the fullest rank")
    local_ranks = world.local_size if world is not None else plan.world_size
    warn(memory_warning(recipe, config, plan, torch.device(kind), local_ranks))
    typer.echo("dry run: no training was started")
