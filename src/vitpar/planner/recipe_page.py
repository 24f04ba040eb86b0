"""GPU-hours of the shipped recipes, and their page."""

from __future__ import annotations

from vitpar.planner.cost.price import price
from vitpar.planner.sources import estimated_costs
from vitpar.planner.training_time import HostInput, TrainingLength, training_time
from vitpar.recipe.shipped import ShippedRecipe, shipped_recipes
from vitpar.strategy import parse, validate
from vitpar.training.optim.state_memory import moments

CLUSTER, MESH = "8xH100", "dp8"
"""Machine and plan for which the duration of recipes is predicted."""


def gpu_hours(shipped: ShippedRecipe, images_per_second: float | None = None) -> float:
    """Predict the GPU-hours of a recipe on `CLUSTER` under `MESH`, without evaluation.

    images_per_second: images that the machine prepares in a second; None to leave waiting for them out.
    """
    recipe = shipped.recipe()
    config = recipe.config(1000)
    costs = estimated_costs(config, CLUSTER, recipe.train.precision, frozen=recipe.frozen(config))
    plan = validate(parse(MESH), config, recipe.train.batch_size)
    priced = price(plan, costs, recipe.train.batch_size, moments(recipe, config))
    hosts = None if images_per_second is None else HostInput(images_per_second, plan.world_size)
    return training_time(priced, TrainingLength(recipe, shipped.about.samples, hosts=hosts))["device_hours"]


def markdown() -> str:
    """Return the page docs/recipes.md."""
    rows = [
        f"| [`{one.name}`](../src/vitpar/recipes/{one.path.name}) | {one.about.title} | {one.about.published} | "
        f"{one.about.here} | {hours(gpu_hours(one))} | {one.about.source} |"
        for one in shipped_recipes()
    ]
    return "\n".join([*_ABOVE, *rows, *_BELOW, ""])


def hours(number: float) -> str:
    """Return GPU-hours as text."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}" if number >= 0.1 else "under 0.1"


_ABOVE = [
    "# Recipes",
    "",
    "These recipes have the numbers of published trainings:",
    "",
    "```",
    "vitpar recipes                       # the list",
    "vitpar recipes deit_small            # one: its file, source and duration",
    "vitpar train --recipe deit_small --data data_shards/imagenet --mesh dp8",
    "```",
    "",
    "| recipe | training | published | here | GPU-hours | source |",
    "|---|---|---|---|---|---|",
]
_BELOW = [
    "",
    f"- GPU-hours are predicted for {CLUSTER} under {MESH}, without evaluation, teachers and waiting for images.",
    "  With the rate of a machine's input: `vitpar recipes --images-per-second RATE`. On others: `vitpar plan MESH",
    "  --recipe NAME --cluster NAME`.",
    "- Tests compare with the code of timm and torch, given the numbers of each source",
    "  (`tests/recipe/test_shipped.py`); the column `here` says what they compare.",
    "- A section `[about]` describes a recipe. It sets nothing, in your recipes too.",
    "- Mixing differs from timm: each pair of images has its own weight, not the batch.",
    "- Recipes of fine-tuning take `--weights`, those of distillation `--set distill.teacher=DIR`; the comment in",
    "  the file says which.",
]
