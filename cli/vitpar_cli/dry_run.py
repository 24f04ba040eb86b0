"""Output of `vitpar train --dry-run`: the merged recipe, the plan, and last the predicted memory and warnings."""

import sys
from collections.abc import Callable

import torch
import typer
from rich.console import Console

from vitpar.launch import find_world
from vitpar.planner.describe import summarize
from vitpar.planner.measure.trial import duration_words
from vitpar.planner.out_of_memory import memory_of, memory_warning, memory_words
from vitpar.recipe.machine import large_batch_warning
from vitpar.recipe.rates.schedules import Schedules
from vitpar.strategy.plan_json import plan_to_json
from vitpar.terminal import say
from vitpar.text import count
from vitpar.training.optim.state_memory import frozen_bytes, state_bytes, state_words
from vitpar.training.prepare import Prepared
from vitpar_cli.outputs import print_json, print_rows, warn
from vitpar_cli.plan_view import millions, show
from vitpar_cli.progress import Sparkline
from vitpar_cli.recipe_words import lr_words

POINTS = 200
"""Steps whose learning rate and other schedules are drawn."""
_TITLES = {"weight_decay": "decay", "drop_path": "drop-path", "image_size": "pixels"}


def show_dry_run(run: Prepared, *, as_json: bool) -> None:
    """Print what a run would do. Of the ranks of a launcher only rank 0 prints.

    Raises PlannerError for a plan whose memory cannot be predicted.
    """
    world = find_world()
    if world is not None and world.rank > 0:
        return
    recipe, config, plan = run.recipe, run.config, run.plan
    train = recipe.train
    memory = memory_of(recipe, config, plan, run.device_type)
    fullest = max(memory, key=lambda one: one.total)
    schedules = Schedules.of(recipe, len(run.train_set), config)
    rate, others = schedules.lr, schedules.named
    steps = sorted({1, rate.run.steps, *range(1, rate.run.steps, max(1, rate.run.steps // POINTS))})
    if as_json:
        record = {
            "learning_rate": [[step, rate(step)] for step in steps],
            **{name: [[step, course(step)] for step in steps] for name, course in others.items()},
            "recipe": recipe.to_toml(),
            "plan": plan_to_json(plan),
            "predicted_memory_bytes": round(fullest.total),
        }
        print_json(record)
        return
    typer.echo(recipe.to_toml())
    state = state_bytes(recipe, config)
    frozen = recipe.frozen(config), frozen_bytes(recipe)
    show(config, plan, summarize(config, plan, train.batch_size, train.precision, state, *frozen), state_words(recipe))
    # Last, to be seen without scrolling.
    typer.echo("")
    rows = {
        "model": f"{config.name}, {millions(config.parameters)} parameters, {config.words[1]}",
        "mesh": f"{plan} on {count(plan.world_size, 'rank')} of {run.device_type}, {train.precision}",
        "lr": lr_words(recipe, len(run.train_set)),
        "": _drawn(rate, steps),
        **{_TITLES[name]: _drawn(course, steps) for name, course in others.items()},
        "memory": f"{memory_words(fullest)} on the fullest rank",
        "time": duration_words(recipe, config, plan, rate.run.steps, run.device_type),
        "plan": run.reason,
    }
    print_rows(Console(highlight=False), ((name, words) for name, words in rows.items() if words))
    local_ranks = world.local_size if world is not None else plan.world_size
    lacking = memory_warning(recipe, config, plan, torch.device(run.device_type), local_ranks)
    warn(*run.warnings, lacking, large_batch_warning(recipe, len(run.train_set)))
    for hint in run.hints:
        say(hint)
    typer.echo("dry run: no training was started")


def _drawn(schedule: Callable[[int], float], steps: list[int]) -> str:
    """Return the course of a schedule in one line, empty for a short run."""
    drawn = Sparkline(steps[-1])
    for step in steps:
        drawn.add(step, schedule(step))
    return drawn.words(sys.stdout.encoding, ".3g") or ""
