"""Blocks of pipeline stages, layouts between stages, stages of ranks, and coordinates of ranks on a plan's axes.

Stages are contiguous runs of blocks, at least one each; embed belongs to the first stage and the head to the last.
The leftmost axis varies slowest, as in DeviceMesh. In a layerwise plan pp is the outermost axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from vitpar.errors import StrategyError
from vitpar.models.description import layer_of
from vitpar.strategy.batch import batch_arithmetic
from vitpar.strategy.layer import Strategy
from vitpar.strategy.layout import Layout, image_layout, output_layout, token_layout
from vitpar.strategy.plan import Plan
from vitpar.strategy.schedules import SCHEDULES
from vitpar.text import count, shown

if TYPE_CHECKING:
    from vitpar.models.config import ModelConfig


def split_blocks(
    num_blocks: int, num_stages: int, how: str | tuple[int, ...], costs: Sequence[float] | None = None
) -> tuple[range, ...]:
    """Return the block indices of each stage, in order.

    how: "even" (sizes differ by at most one, larger stages first), "balanced" (minimizes the largest cost of a stage,
    and among those splits the sum of squared costs), or the number of blocks of each stage
    costs: for "balanced", one cost per layer in any unit, in the order embed, blocks, head (num_blocks + 2 values)

    Raises StrategyError if there are more stages than blocks, or if given sizes do not fit.
    """
    assert num_stages >= 1, f"the pipeline has {num_stages} stages: use at least 1"
    if num_stages > num_blocks:
        raise StrategyError(
            f"{count(num_blocks, 'block')} cannot fill {num_stages} stages: use at most {count(num_blocks, 'stage')}"
        )
    if how == "even":
        size, larger = divmod(num_blocks, num_stages)
        sizes: Sequence[int] = [size + (stage < larger) for stage in range(num_stages)]
    elif how == "balanced":
        assert costs is not None and len(costs) == num_blocks + 2, "a cost for embed, each block and head"
        sizes = _balanced_sizes(num_blocks, num_stages, costs)
    else:
        assert not isinstance(how, str), f"unknown split '{how}'"
        sizes = _checked_sizes(how, num_blocks, num_stages)
    return tuple(range(start, end) for start, end in pairwise(accumulate(sizes, initial=0)))


def rank_of_stage(stage: int, plan: Plan) -> int:
    """Return the index on the pp axis of the rank that holds `stage`.

    Stages go round the ranks, or down and back up under V-shaped schedules.
    """
    assert 0 <= stage < plan.num_stages, f"stage {stage} is outside '{plan}'"
    turn, place = divmod(stage, plan.pipeline_degree)
    return plan.pipeline_degree - 1 - place if SCHEDULES[plan.schedule].v_shaped and turn % 2 else place


def stages_of_rank(pp_rank: int, plan: Plan) -> tuple[int, ...]:
    """Return the stages that rank `pp_rank` of the pp axis holds, in order."""
    assert 0 <= pp_rank < plan.pipeline_degree, f"pp rank {pp_rank} is outside '{plan}'"
    return tuple(stage for stage in range(plan.num_stages) if rank_of_stage(stage, plan) == pp_rank)


def _checked_sizes(sizes: tuple[int, ...], num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return `sizes` if they split `num_blocks` blocks into `num_stages` stages, else raise StrategyError."""
    said = f"split {shown(','.join(map(str, sizes))) or '()'}"
    fix = f"give {count(num_stages, 'number')} with sum {num_blocks}"
    if len(sizes) != num_stages:
        raise StrategyError(f"{said} is for {count(len(sizes), 'stage')} but the plan has {num_stages}: {fix}")
    for stage, size in enumerate(sizes):
        if size < 1:
            raise StrategyError(f"{said} gives {shown(size)} blocks to stage {stage}: give every stage at least 1")
    if sum(sizes) != num_blocks:
        raise StrategyError(f"{said} has {shown(count(sum(sizes), 'block'))} but the model has {num_blocks}: {fix}")
    return sizes


def _balanced_sizes(num_blocks: int, num_stages: int, costs: Sequence[float]) -> list[int]:
    """Return the number of blocks of each stage of the balanced split.

    First the smallest possible maximum is found, then the smallest sum of squares under that maximum.
    """
    upto = list(accumulate(costs[1:-1], initial=0.0))

    def stage_cost(start: int, end: int) -> float:
        """Return the cost of the stage with blocks start..end-1, including embed or head if it holds them."""
        return upto[end] - upto[start] + (start == 0) * costs[0] + (end == num_blocks) * costs[-1]

    worst, _ = _best_split(num_blocks, num_stages, stage_cost, max)

    def squares(best: float, cost: float) -> float:
        return best + (cost / worst if worst else 0.0) ** 2 if cost <= worst else math.inf

    return _best_split(num_blocks, num_stages, stage_cost, squares)[1]


def _best_split(
    num_blocks: int, num_stages: int, stage_cost: Callable[[int, int], float], fold: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the smallest value over all splits, and the sizes of a split that has it.

    stage_cost: cost of the stage with blocks start..end-1; non-decreasing as blocks are added
    fold: function (value of the earlier stages, cost of one more stage) -> value of all of them; non-decreasing in both
    """
    # Dynamic programming: `best[end]` is the best split of the first `end` blocks. As `fold` never decreases in the
    # value of the earlier stages, a best split consists of best splits.
    none: tuple[float, list[int]] = (math.inf, [])
    best = [(0.0, none[1])] + [none] * num_blocks
    for stage in range(1, num_stages + 1):
        longer = [none] * (num_blocks + 1)
        for end in range(stage, num_blocks + 1):
            smallest, place = math.inf, 0
            for start in range(end - 1, stage - 2, -1):
                cost = stage_cost(start, end)
                least = fold(0.0, cost)
                if least > smallest or least == math.inf:
                    break  # every longer stage costs at least as much
                value = fold(best[start][0], cost)
                if value <= smallest:
                    smallest, place = value, start
            if smallest < math.inf:
                longer[end] = (smallest, [*best[place][1], end - place])
        best = longer
    return best[num_blocks]


def place_of_rank(plan: Plan, rank: int) -> tuple[int, int]:
    """Return (index along pp, rank within the stage) of a global rank."""
    assert 0 <= rank < plan.world_size, f"rank {rank} is outside '{plan}'"
    inner = _inner_size(plan)
    outer, low = divmod(rank, inner)
    high, pp = divmod(outer, plan.pipeline_degree)
    return pp, high * inner + low


def rank_of_place(plan: Plan, pp: int, stage_rank: int) -> int:
    """Return the global rank with this index along pp and this rank within the stage: inverse of `place_of_rank`."""
    inner = _inner_size(plan)
    high, low = divmod(stage_rank, inner)
    return (high * plan.pipeline_degree + pp) * inner + low


def _inner_size(plan: Plan) -> int:
    """Return the product of the degrees of the axes inside pp, which vary faster in the rank order."""
    if not plan.is_uniform or plan.pp == 1:
        return plan.stage_size
    return math.prod(axis.size for axis in plan.strategy.axes[plan.pp_index :])


def stage_layers(config: ModelConfig, plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return the layer names of each stage: blocks as the plan splits them."""
    costs = [float(flops) for flops in config.layer_flops.values()]
    stages = [
        [config.blocks[i] for i in blocks]
        for blocks in split_blocks(config.num_blocks, plan.num_stages, plan.split, costs)
    ]
    stages[0].insert(0, config.first_layer.name)
    stages[-1].append(config.last_layer.name)
    return tuple(tuple(names) for names in stages)


def images_are_at_outputs(config: ModelConfig, plan: Plan) -> bool:
    """Return whether every rank gives the outputs of exactly the images that it takes."""
    strategies = tuple(plan.strategies(config.layer_names).values())
    return plan.num_stages == 1 and image_layout(strategies[0]) == output_layout(strategies[-1])


def takes_all_of(plan: Plan, other: Plan, config: ModelConfig, there: ModelConfig, batch_size: int) -> bool:
    """Return whether every rank takes at least the images under `plan` that it takes under `other`.

    config, there: models of the two plans, which take the same images.
    """
    mine, others = _image_rows(plan, config, batch_size), _image_rows(other, there, batch_size)
    return all(rows <= mine.get(rank, set()) for rank, rows in others.items())


def _image_rows(plan: Plan, config: ModelConfig, batch_size: int) -> dict[int, set[int]]:
    """Return the images of a batch that each rank takes, by rank; ranks of later stages are left out."""
    batch = batch_arithmetic(plan, batch_size)
    layout = image_layout(plan.strategies(config.layer_names)[config.first_layer.name])
    return {rank_of_place(plan, 0, place): {*batch.rows(part)} for place, part in enumerate(layout)}


def travel_layouts(config: ModelConfig, plan: Plan) -> tuple[Layout, ...]:
    """Return, for each boundary between stages, the layout in which tokens are sent."""
    strategies, parts = plan.strategies(config.layer_names), stage_layers(config, plan)
    return tuple(travel_layout(strategies[before[-1]], strategies[behind[0]]) for before, behind in pairwise(parts))


def travel_layout(before: Strategy, behind: Strategy) -> Layout:
    """Return the layout in which tokens are sent between stages.

    before: strategy of the sending stage's last layer. behind: strategy of the receiving stage's first layer.
    The layout with the smaller parts wins: each rank sends its part to one rank of the next stage, so smaller parts
    mean less traffic. The other side redistributes within its stage.
    """
    given, taken = token_layout(before), token_layout(behind)
    return taken if taken[0].share < given[0].share else given


def sharing_places(config: ModelConfig, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the indices on the pp axis that hold each shared parameter, by its owner's name; tables are left out."""
    stages = {name: index for index, names in enumerate(stage_layers(config, plan)) for name in names}
    return {
        owner: tuple(sorted({rank_of_stage(stages[layer_of(name)], plan) for name in names}))
        for owner, names in config.holders.items()
        if owner not in config.tables
    }
