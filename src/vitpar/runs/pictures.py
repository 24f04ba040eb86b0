"""Pictures of a plan: the ranks on its axes, its layers, and the timeline of its pipeline."""

from __future__ import annotations

from html import escape
from pathlib import Path

from vitpar.errors import UserError
from vitpar.models import ModelConfig
from vitpar.pages import svg
from vitpar.pages.maps import layer_map, rank_grid
from vitpar.pages.spans import ACTIONS, Span
from vitpar.strategy import Plan
from vitpar.training.recipe import read_recipe

MOST_SPANS = 2000
"""Maximum number of spans in a timeline; a page with more would be large."""
MOST_ACTIONS = 50_000
"""Maximum number of actions of a pipeline that are replayed."""
MOST_PLACES = 1 << 15
"""Maximum number of ranks of a plan, times its stages or its distinct strategies, that are looked at."""


def plan_pictures(plan: Plan, config: ModelConfig | None) -> str:
    """Return the HTML of a plan's pictures.

    config: configuration of the model, for the map of layers; None leaves the map out.
    """
    try:
        return _pictures(plan, config)
    except UserError as error:  # a plan that was edited, or that does not fit the recipe
        return f"<p>The plan cannot be drawn: {escape(str(error))}.</p>"


def _pictures(plan: Plan, config: ModelConfig | None) -> str:
    if plan.world_size == 1:
        return "<p>Rank 0 holds the complete model and batch.</p>"
    if plan.world_size * max(plan.num_stages, len(plan.distinct)) > MOST_PLACES:
        return f"<p>The plan has {plan.world_size:,} ranks: too many to draw.</p>"
    parts = ["<h3>Ranks on each axis</h3>", rank_grid(plan)]
    if config is not None:
        parts += ["<h3>Layers and ranks</h3>", layer_map(config, plan)]
    if plan.pipeline_degree > 1:
        parts += ["<h3>Pipeline of a step</h3>", pipeline_timeline(plan)]
    return "".join(parts)


def pipeline_timeline(plan: Plan) -> str:
    """Return the timeline of a plan's pipeline in theory, as HTML.

    It assumes equal stages, a backward twice as long as the forward, and free communication.
    """
    from vitpar.planner.cost.pipeline import UNITS, idle_share, replay
    from vitpar.strategy.pipeline_orders import action_order

    batches = plan.microbatches or 1
    if 3 * batches * plan.num_stages > MOST_ACTIONS:
        return f"<p>A step has {batches:,} micro-batches in {plan.num_stages:,} stages: too many to draw.</p>"
    events = replay(
        action_order(plan, batches), plan.num_stages, lambda computation, stage, microbatch: UNITS[computation]
    )
    spans = [Span(f"pp {e.pp}", ACTIONS[e.computation], e.start, e.end, e.microbatch, e.stage) for e in events]
    spans.sort(key=lambda span: (span.start, span.row))
    idle = f"{idle_share(plan, batches) * 100:.1f} %"
    cut = f" The first {MOST_SPANS:,} of {len(spans):,} spans are shown." * (len(spans) > MOST_SPANS)
    note = (
        f"{plan.schedule}, {batches:,} micro-batches, in theory {idle} of the time idle: equal stages, a backward "
        f"twice as long as the forward (1 unit), free communication.{cut}"
    )
    drawn = svg.timeline(spans[:MOST_SPANS], max(span.end for span in spans), unit="")
    return f'{drawn}<p class="note">{escape(note)}</p>'


def config_of(run: Path) -> ModelConfig | None:
    """Return the configuration of a run's model; None for a model of the user's own, or a damaged recipe."""
    try:
        # The number of classes changes neither layers nor ranks.
        return read_recipe(run / "recipe.toml").config(num_classes=1000)
    except (UserError, OSError):
        return None
