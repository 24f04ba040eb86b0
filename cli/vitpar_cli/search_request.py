"""Searches that a command line asks for: one, or one for each combination of clusters, models and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from vitpar.errors import UserError
from vitpar.recipe import Recipe
from vitpar.recipe.request import RecipeRequest
from vitpar_cli.profiled import MachineOptions, planned_recipe

if TYPE_CHECKING:
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.search.best import Search
    from vitpar_cli.search_view import SearchProgress

SECONDS = 20.0
"""Default limit of a search, in seconds."""
ROW_SECONDS = 2.0
"""Default limit of a search for one row of a table, in seconds."""


@dataclass(frozen=True)
class SearchRequest:
    """Options of `vitpar search` that all its searches share."""

    asked: RecipeRequest
    """Recipe and its settings."""
    limits: Mapping[str, Any]
    """Ranks, micro-batches, roles and what to leave out, as `vitpar.planner.automatic.make_search` takes them."""
    seconds: float | None
    """Time limit of a search; None for the default."""

    def recipe(self, model: str | None, image_size: int | None) -> Recipe:
        """Return the recipe with this model and image size; None for its own."""
        return planned_recipe(self.asked | {"model.name": model, "model.image_size": image_size})

    def search(self, recipe: Recipe, costs: LayerCosts, batch_sizes: tuple[int, ...], seconds: float) -> Search:
        """Return the search for the best plan at one of the batch sizes."""
        from vitpar.planner.automatic import make_search
        from vitpar.training.optim.state_memory import moments

        state = moments(recipe, costs.whole)
        return make_search(costs, batch_sizes, state, **self.limits, seconds=self.seconds or seconds)

    def table(
        self,
        models: Sequence[str | None],
        image_sizes: Sequence[int | None],
        machines: Sequence[MachineOptions],
        batch_sizes: Sequence[int] | None,
        progress: SearchProgress,
    ) -> Iterator[dict[str, Any]]:
        """Yield the best plan of each combination, or why it has none.

        batch_sizes: None for the recipe's

        Raises UserError for names and options that no combination could use.
        """
        from vitpar.planner.profile.cluster import find_cluster
        from vitpar.planner.report.tables import compared

        named = [find_cluster(one.cluster).name if one.cluster else "" for one in machines]
        for model in models:
            self.recipe(model, None).config(1)  # refuses unknown names
        total = len(models) * len(image_sizes) * len(machines) * len(batch_sizes or (0,))
        done = 0
        for model, image_size, (machine, name) in product(models, image_sizes, zip(machines, named, strict=True)):
            recipe = self.recipe(model, image_size)
            images, why = batch_sizes or (recipe.train.batch_size,), ""
            try:
                costs = machine.costs(recipe, self.limits["ranks"])
            except UserError as error:
                why = str(error)
            for batch_size in images:
                done += 1
                if why:
                    place = recipe.model.name, image_size or recipe.model.image_size or 0, name
                else:
                    place = costs.config.name, costs.config.image_size, costs.hardware.name
                where = dict(zip(("model", "image_size", "cluster"), place, strict=True)) | {"batch_size": batch_size}
                if why:
                    yield where | {"why": why}
                    continue
                progress.about = f"{done} of {total}: {place[0]}, {place[1]} pixels on {place[2]}, batch {batch_size:,}"
                searching = self.search(recipe, costs, (batch_size,), ROW_SECONDS)
                length = machine.length(recipe, costs.hardware.ranks)
                yield compared(where, searching, machine.budget(costs), length, progress)


def words(text: str) -> list[str]:
    """Return the words of a comma-separated list such as `dp, tp`."""
    return [word.strip() for word in text.split(",") if word.strip()]
