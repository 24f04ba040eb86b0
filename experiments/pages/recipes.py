"""The shipped recipes with source, published result and predicted GPU-hours."""

from vitpar.planner.training_time import CLUSTER, MESH, gpu_hours, hours
from vitpar.recipe.file import shipped_recipes

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


def page() -> str:
    """Return the page."""
    rows = [
        f"| [`{one.name}`](../src/vitpar/recipes/{one.path.name}) | {one.about.title} | {one.about.published} | "
        f"{one.about.here} | {hours(gpu_hours(one))} | {one.about.source} |"
        for one in shipped_recipes()
    ]
    return "\n".join([*_ABOVE, *rows, *_BELOW, ""])
