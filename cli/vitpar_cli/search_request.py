"""Searches that a command line asks for: one, or one for each combination of clusters, models and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from vitpar.errors import UserError
from vitpar.limits import MAX_BATCH_SIZE
from vitpar.recipe import Recipe
from vitpar.recipe.request import RecipeRequest
from vitpar.sizes import parse_size
from vitpar_cli import profiled

if TYPE_CHECKING:
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.search.best import Search
    from vitpar.planner.training_time import TrainingLength
    from vitpar_cli.search_view import SearchProgress

SECONDS = 20.0
"""Default limit of a search, in seconds."""
ROW_SECONDS = 2.0
"""Default limit of a search for one row of a table, in seconds."""


class SearchRequest:
    """Options of `vitpar search` that all its searches share.

    asked: recipe and its settings.
    options: arguments of the command by name.

    Raises PlannerError and UserError for options that cannot be read.
    """

    def __init__(self, asked: RecipeRequest, options: Mapping[str, Any]) -> None:
        self.asked, self._options = asked, options
        self._memory = None if options["memory"] is None else parse_size(options["memory"])
        counts, left_out = options["microbatches"], words(options["without"])
        self.limits: dict[str, Any] = {
            "ranks": options["ranks"],
            "microbatches": profiled.numbers(counts, "--microbatches", MAX_BATCH_SIZE) if counts else None,
            "roles": words(options["roles"]),
            "without": frozenset(word.lstrip("+") for word in left_out),
        }
        of_cluster = (options[name] for name in ("mtbf", "hour_price", "stall", "restart"))
        self._conditions = profiled.conditions(*of_cluster)

    def recipe(self, model: str | None, image_size: int | None) -> Recipe:
        """Return the recipe with this model and image size; None for its own."""
        return profiled.planned_recipe(self.asked | {"model.name": model, "model.image_size": image_size})

    def costs(self, recipe: Recipe, cluster: str | None) -> LayerCosts:
        """Return the costs of the recipe's model on a cluster; None for the profiled machine."""
        names = "hardware", "model_profile", "num_classes", "ranks"
        return profiled.costs_of(recipe, cluster, *(self._options[name] for name in names))

    def search(self, recipe: Recipe, costs: LayerCosts, batch_sizes: tuple[int, ...], seconds: float) -> Search:
        """Return the search for the best plan at one of the batch sizes."""
        from vitpar.planner.automatic import make_search
        from vitpar.training.optim.state_memory import moments

        state = moments(recipe, costs.whole)
        return make_search(costs, batch_sizes, state, **self.limits, seconds=self._options["seconds"] or seconds)

    def budget(self, costs: LayerCosts) -> float:
        """Return the memory limit of a rank, in bytes."""
        from vitpar.planner.sources import usual_budget

        return self._memory or usual_budget(costs)

    def length(self, recipe: Recipe, cluster: str | None, costs: LayerCosts) -> TrainingLength:
        """Return the length of the recipe's training on a cluster; None for the profiled machine."""
        from vitpar.planner.training_time import training_length

        hosts = profiled.host_input(self._options["images_per_second"], cluster, costs.hardware.ranks)
        return training_length(recipe, self._conditions, hosts)

    def table(
        self,
        models: Sequence[str | None],
        image_sizes: Sequence[int | None],
        clusters: Sequence[str | None],
        batch_sizes: Sequence[int] | None,
        progress: SearchProgress,
    ) -> Iterator[dict[str, Any]]:
        """Yield the best plan of each combination, or why it has none.

        batch_sizes: None for the recipe's

        Raises UserError for names and options that no combination could use.
        """
        from vitpar.planner.profile.cluster import find_cluster
        from vitpar.planner.report.comparison import compared

        named = {cluster: find_cluster(cluster).name for cluster in clusters if cluster}
        for model in models:
            self.recipe(model, None).config(1)  # refuses unknown names
        total = len(models) * len(image_sizes) * len(clusters) * len(batch_sizes or (0,))
        done = 0
        for model, image_size, cluster in product(models, image_sizes, clusters):
            recipe = self.recipe(model, image_size)
            images, why = batch_sizes or (recipe.train.batch_size,), ""
            try:
                costs = self.costs(recipe, cluster)
            except UserError as error:
                why = str(error)
            for batch_size in images:
                done += 1
                if why:
                    place = recipe.model.name, image_size or recipe.model.image_size or 0, named.get(cluster or "", "")
                else:
                    place = costs.config.name, costs.config.image_size, costs.hardware.name
                where = dict(zip(("model", "image_size", "cluster"), place, strict=True)) | {"batch_size": batch_size}
                if why:
                    yield where | {"why": why}
                    continue
                progress.about = f"{done} of {total}: {place[0]}, {place[1]} pixels on {place[2]}, batch {batch_size:,}"
                searching = self.search(recipe, costs, (batch_size,), ROW_SECONDS)
                yield compared(where, searching, self.budget(costs), self.length(recipe, cluster, costs), progress)


def words(text: str) -> list[str]:
    """Return the words of a comma-separated list such as `dp, tp`."""
    return [word.strip() for word in text.split(",") if word.strip()]
