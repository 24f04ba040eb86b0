"""Duration of a complete training: its steps and images by the recipe, its days and device-hours by a plan's price."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitpar.data.shards.manifest import has_manifest, read_manifest
from vitpar.planner.cost.price import Price, price
from vitpar.planner.goodput import Conditions, goodput
from vitpar.planner.sources import estimated_costs, planned_teacher
from vitpar.recipe.defaults import row_of
from vitpar.recipe.file import ShippedRecipe
from vitpar.recipe.recipe import Recipe
from vitpar.strategy import parse, validate
from vitpar.tasks import task_of
from vitpar.tasks.known import task_class
from vitpar.text import count
from vitpar.training.optim.state_memory import moments

CLUSTER, MESH = "8xH100", "dp8"
"""Machine and plan for which the duration of shipped recipes is predicted."""
HostInput = tuple[float, int]
"""(samples a second that a machine prepares, devices of a machine)."""


@dataclass(frozen=True)
class TrainingLength:
    """Length of a training, at any batch size."""

    recipe: Recipe
    """Recipe with epochs or steps."""
    samples: int
    """Images of the training set."""
    assumed: str = ""
    """Assumptions, and how to change them; empty if there are none."""
    conditions: Conditions | None = None
    """Failures and price of the cluster; None if neither is known."""
    hosts: HostInput | None = None
    """Input of the machines; None if it is unknown, and then input is free."""

    def steps(self, batch_size: int) -> int:
        """Return the number of steps with `batch_size` images each."""
        train = self.recipe.train.model_copy(update={"batch_size": batch_size})
        return self.recipe.model_copy(update={"train": train}).total_steps(self.samples)


def training_length(
    recipe: Recipe, conditions: Conditions | None = None, hosts: HostInput | None = None
) -> TrainingLength:
    """Return the length of a recipe's training.

    conditions: failures and price of the cluster.
    hosts: input of the machines; None if it is unknown.

    Data that are not on this machine count as the published ones of the task, such as ImageNet-1k. A recipe with
    neither epochs nor steps has the epochs of the default settings for that number of samples.

    Raises DataError for data that cannot be read.
    """
    train, samples, task = recipe.train, _samples(recipe), task_class(recipe)
    usual, known = row_of(recipe.task.name, samples), samples is not None
    samples = samples or usual.samples
    of = f"{samples:,} {task.SAMPLE}s"
    of = of if known else f"{usual.example}'s {of}"
    if train.epochs is None and train.steps is None:
        train = train.model_copy(update={"epochs": float(usual.epochs)})
        recipe = recipe.model_copy(update={"train": train})
        others = "another number with --epochs" if known else "others with --epochs and --data"
        assumed = f"{train.epochs:g} epochs of {of} are assumed: give {others}"
    elif known or train.steps is not None:
        assumed = ""
    else:
        assumed = f"{of} are assumed: name other data with --data"
    return TrainingLength(recipe, samples, assumed, conditions, hosts)


def training_time(priced: Price, length: TrainingLength) -> dict[str, Any]:
    """Return the predicted duration of a training under a plan, without evaluation and checkpoints.

    `images` are those of all steps, `samples` those of the training set; `epochs` is None for a length in steps.
    `input_rate` is the samples that all hosts prepare in a second; None if unknown, and then input is free.
    `waiting` is the share of the time in which the devices wait for it. `goodput` is None without conditions of the
    cluster.
    """
    steps, batch_size, ranks = length.steps(priced.batch_size), priced.batch_size, priced.plan.world_size
    rate = length.hosts[0] * math.ceil(ranks / length.hosts[1]) if length.hosts else None
    step = priced.seconds if rate is None else max(priced.seconds, batch_size / rate)
    return {
        "steps": steps,
        "images": steps * batch_size,
        "seconds": steps * step,
        "device_hours": steps * step * ranks / 3600,
        "epochs": length.recipe.train.epochs,
        "samples": length.samples,
        "assumed": length.assumed,
        "goodput": goodput(steps, step, ranks, length.conditions) if length.conditions else None,
        "input_rate": rate,
        "waiting": 1 - priced.seconds / step,
    }


def gpu_hours(shipped: ShippedRecipe, images_per_second: float | None = None) -> float:
    """Predict the GPU-hours of a shipped recipe on `CLUSTER` under `MESH`, without evaluation.

    images_per_second: images that the machine prepares in a second; None to leave waiting for them out.
    """
    recipe = shipped.recipe()
    task = task_of(recipe, 1000)
    config = recipe.config(task.outputs, task.model_options)
    teacher = planned_teacher(recipe, config) if task.AVERAGES else None
    costs = estimated_costs(config, CLUSTER, recipe.train.precision, frozen=recipe.frozen(config), teacher=teacher)
    plan = validate(parse(MESH), config, recipe.train.batch_size)
    priced = price(plan, costs, recipe.train.batch_size, moments(recipe, config))
    hosts = None if images_per_second is None else (images_per_second, plan.world_size)
    return training_time(priced, TrainingLength(recipe, shipped.about.samples, hosts=hosts))["device_hours"]


def condition_words(training: Mapping[str, Any]) -> dict[str, str]:
    """Return shares of waiting and useful time, days and cost by name, for a table; only what is known."""
    found = training["goodput"]
    known = {} if training["input_rate"] is None else {"waiting": f"{training['waiting']:.0%}"}
    if found is None:
        return known
    known |= {} if found["job_mtbf_hours"] is None else {"useful": f"{found['useful']:.1%}"}
    if found["seconds"] is None:
        return known | {"days": "never"}
    known["days"] = figure(found["seconds"] / 86_400)
    return known if found["cost"] is None else known | {"cost": figure(found["cost"])}


def training_rows(training: Mapping[str, Any] | None, hours: str) -> list[tuple[str, str]]:
    """Return names and sentences on the duration, input, failures and cost; none for what is unknown.

    Example: training, `1.25 days, 240 GPU-hours: 375,342 steps, 300 epochs of 1,281,167 samples; …`.

    training: result of `training_time`.
    hours: name of device-hours
    """
    if training is None:
        return []
    length, epochs = f"{training['images']:,} samples", training["epochs"]
    if epochs is not None:
        length = f"{epochs:g} epoch{'s' * (epochs != 1)} of {training['samples']:,} samples"
    left_out = "evaluation and checkpoints" if training["input_rate"] else "input, evaluation and checkpoints"
    words = f"{spent(training['seconds'])}, {figure(training['device_hours'])} {hours}: {training['steps']:,} steps"
    found, rows = training["goodput"], [("training", f"{words}, {length}; {left_out} not included")]
    if (rate := training["input_rate"]) is not None:
        share = training["waiting"]
        waiting = f"devices wait {share:.0%} of the time" if share else "as many as the devices need"
        rows.append(("input", f"the hosts prepare {rate:,.0f} samples/s: {waiting}"))
    if found is None:
        return rows
    if found["job_mtbf_hours"] is not None:
        words = f"one in {spent(found['job_mtbf_hours'] * 3600)} on {count(found['devices'], 'device')}; "
        if found["seconds"] is None:
            words += "the training would practically never end: use fewer devices"
        else:
            words += (
                f"with a checkpoint every {found['interval_steps']:,} steps ({spent(found['interval_seconds'])}), "
                f"{found['useful']:.1%} of the time is useful: {spent(found['seconds'])}, "
                f"{figure(found['device_hours'])} {hours}"
            )
        rows.append(("failures", words))
    if found["cost"] is not None:
        rows.append(("cost", f"{figure(found['cost'])} for {figure(found['device_hours'])} {hours}"))
    return rows


def hours_name(device_type: str) -> str:
    """Return the name of device-hours: GPU-hours, or rank-hours on CPUs."""
    return "GPU-hours" if device_type == "cuda" else "rank-hours"


def hours(number: float) -> str:
    """Return GPU-hours as text."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}" if number >= 0.1 else "under 0.1"


def spent(seconds: float) -> str:
    """Return a duration such as `1.25 days`."""
    units = (("days", 86_400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
    return next(f"{figure(seconds / unit)} {name}" for name, unit in units if seconds >= unit or unit == 1)


def figure(number: float) -> str:
    """Return a number with three digits, or without decimals if it is larger: `0.0123`, `1.20`, `48.2`, `12,345`."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:#.3g}"


def _samples(recipe: Recipe) -> int | None:
    """Return the number of training images of the recipe's data; None if they are not on this machine."""
    path = recipe.data.path
    if path is None:
        return recipe.stream.samples
    split = read_manifest(path).splits.get("train") if has_manifest(path) else None
    return split.samples if split else None
