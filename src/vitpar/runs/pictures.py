"""Pictures of a plan: the ranks on its axes, its layers, and the timeline of its pipeline."""

from __future__ import annotations

from html import escape
from pathlib import Path

from vitpar.errors import UserError
from vitpar.models import ModelConfig
from vitpar.recipe import read_recipe
from vitpar.runs.pages.figures import timeline
from vitpar.runs.pages.maps import placement, rank_grid
from vitpar.runs.pages.plotly import Charts
from vitpar.strategy import Plan

MOST_ACTIONS = 50_000
"""Maximum number of actions of a pipeline that are replayed."""
MOST_PLACES = 1 << 15
"""Maximum number of ranks of a plan, times its stages or its distinct strategies, that are looked at."""


def plan_pictures(plan: Plan, config: ModelConfig | None, page: Charts) -> str:
    """Return the HTML of a plan's pictures.

    config: configuration of the model, for the map of layers; None leaves the map out.
    page: page that the timeline is added to.
    """
    if plan.world_size == 1:
        return "<p>Rank 0 holds the complete model and batch.</p>"
    if plan.world_size * max(plan.num_stages, len(plan.distinct)) > MOST_PLACES:
        return f"<p>The plan has {plan.world_size:,} ranks: too many to draw.</p>"
    try:
        drawn = placement(plan, config) or rank_grid(plan)
        return drawn + (_pipeline(plan, page) if plan.pipeline_degree > 1 else "")
    except UserError as error:  # a plan that was edited, or that does not fit the recipe
        return f"<p>The plan cannot be drawn: {escape(str(error))}.</p>"


def _pipeline(plan: Plan, page: Charts) -> str:
    """Return the timeline of a plan's pipeline in theory.

    It assumes equal stages, a backward twice as long as the forward, and free communication.
    """
    from vitpar.planner.cost.pipeline import ideal_events, idle_share
    from vitpar.planner.report.timeline import spans_of
    from vitpar.strategy.pipeline_orders import action_order

    batches = plan.microbatches or 1
    if 3 * batches * plan.num_stages > MOST_ACTIONS:
        return f"<p>A step has {batches:,} micro-batches in {plan.num_stages:,} stages: too many to draw.</p>"
    events = ideal_events(action_order(plan, batches), plan.num_stages)
    note = (
        f"{plan.schedule}, {batches:,} micro-batches, in theory {idle_share(plan, batches) * 100:.1f} % of the time "
        "idle: equal stages, a backward twice as long as the forward (1 unit), free communication."
    )
    return page.add(timeline("Pipeline of a step", spans_of(events), events[-1].end, unit="", note=note))


def config_of(run: Path) -> ModelConfig | None:
    """Return the configuration of a run's model; None for a model of the user's own, or a damaged recipe."""
    try:
        # The number of classes changes neither layers nor ranks.
        return read_recipe(run / "recipe.toml").config(num_classes=1000)
    except (UserError, OSError):
        return None
