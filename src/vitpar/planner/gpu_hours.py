"""GPU-hours of the shipped recipes."""

from __future__ import annotations

from vitpar.planner.cost.price import price
from vitpar.planner.sources import estimated_costs, planned_teacher
from vitpar.planner.training_time import HostInput, TrainingLength, training_time
from vitpar.recipe.shipped import ShippedRecipe
from vitpar.strategy import parse, validate
from vitpar.tasks import task_of
from vitpar.training.optim.state_memory import moments

CLUSTER, MESH = "8xH100", "dp8"
"""Machine and plan for which the duration of recipes is predicted."""


def gpu_hours(shipped: ShippedRecipe, images_per_second: float | None = None) -> float:
    """Predict the GPU-hours of a recipe on `CLUSTER` under `MESH`, without evaluation.

    images_per_second: images that the machine prepares in a second; None to leave waiting for them out.
    """
    recipe = shipped.recipe()
    task = task_of(recipe, 1000)
    config = recipe.config(task.outputs, task.model_options)
    teacher = planned_teacher(recipe, config) if task.AVERAGES else None
    costs = estimated_costs(config, CLUSTER, recipe.train.precision, frozen=recipe.frozen(config), teacher=teacher)
    plan = validate(parse(MESH), config, recipe.train.batch_size)
    priced = price(plan, costs, recipe.train.batch_size, moments(recipe, config))
    hosts = None if images_per_second is None else HostInput(images_per_second, plan.world_size)
    return training_time(priced, TrainingLength(recipe, shipped.about.samples, hosts=hosts))["device_hours"]


def hours(number: float) -> str:
    """Return GPU-hours as text."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}" if number >= 0.1 else "under 0.1"
