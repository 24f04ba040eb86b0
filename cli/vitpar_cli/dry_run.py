"""Output of `vitpar train --dry-run`: the merged recipe, the plan, and last the predicted memory and warnings."""

import json
from typing import TYPE_CHECKING

import torch
import typer

from vitpar.launch import find_world
from vitpar.launch.world import Device
from vitpar.planner.describe import summarize
from vitpar.planner.out_of_memory import estimate_memory, memory_warning, memory_words
from vitpar.strategy.plan_json import plan_to_json
from vitpar.terminal import say
from vitpar.text import count
from vitpar.training.optim.state_memory import frozen_bytes, moments, state_bytes, state_words
from vitpar.training.recipe.machine import large_batch_warning
from vitpar_cli.outputs import warn
from vitpar_cli.plan_view import show
from vitpar_cli.plan_words import millions

if TYPE_CHECKING:
    from vitpar.models.config import ModelConfig
    from vitpar.training.recipe import Recipe
    from vitpar.training.recipe.recipe import Chosen


def show_dry_run(
    recipe: "Recipe",
    config: "ModelConfig",
    chosen: "Chosen",
    images: int,
    device_type: Device,
    *,
    searched: bool,
    as_json: bool,
) -> None:
    """Print what a run would do. Of the ranks of a launcher only rank 0 prints.

    recipe: with all settings resolved.
    chosen: its plan.
    images: number of training images.
    searched: whether the plan was searched; if not, the reason for it is a warning.

    Raises PlannerError for a plan whose memory cannot be predicted.
    """
    world = find_world()
    if world is not None and world.rank > 0:
        return
    train, plan = recipe.train, chosen.plan
    frozen = recipe.frozen(config)
    memory = estimate_memory(config, plan, train.batch_size, train.precision, moments(recipe), frozen)
    fullest = max(memory, key=lambda one: one.total)
    if as_json:
        record = {
            "recipe": recipe.to_toml(),
            "plan": plan_to_json(plan),
            "predicted_memory_bytes": round(fullest.total),
        }
        typer.echo(json.dumps(record))
        return
    typer.echo(recipe.to_toml())
    summary = summarize(config, plan, train.batch_size, state_bytes(recipe), frozen_bytes(recipe, config))
    show(config, plan, train.precision, summary, state_words(recipe))
    # Last, to be seen without scrolling.
    typer.echo("")
    rows = {
        "model": f"{config.name}, {millions(summary.parameters)} parameters, {config.num_classes:,} classes",
        "mesh": f"{plan} on {count(plan.world_size, 'rank')} of {device_type}, {train.precision}",
        "memory": f"{memory_words(fullest)} on the fullest rank",
    }
    reason = {"plan": chosen.because} if searched and chosen.because else {}
    for name, words in (rows | reason).items():
        say(f"{name:<11}{words}", indent=11)
    local_ranks = world.local_size if world is not None else plan.world_size
    lacking = memory_warning(recipe, config, plan, torch.device(device_type), local_ranks)
    warn(None if searched else chosen.because, lacking, large_batch_warning(recipe, images))
    typer.echo("dry run: no training was started")
