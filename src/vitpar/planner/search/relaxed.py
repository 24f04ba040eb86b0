"""Lower bound on the seconds of all plans of one outline, with any mix of strategies and any split.

It is a Lagrangian relaxation of time and memory, in which every layer chooses its strategy independently.
"""

from __future__ import annotations

import numpy as np

from vitpar.planner.search.bounds import BYTES, Machine, PlanOutline, layer_sums, totals
from vitpar.planner.search.loads import Array
from vitpar.planner.search.options import Choices
from vitpar.planner.search.sections import Sections

STEPS = 40
"""Maximum number of subgradient steps of `least_seconds`."""


def least_seconds(
    outline: PlanOutline,
    choices: Choices,
    sections: Sections,
    machine: Machine,
    *,
    steps: int = STEPS,
    enough: float = float("inf"),
) -> float:
    """Return a lower bound on the seconds of a step over every mix of `choices`; infinite if none fits into memory.

    A step takes at least each of several sums over layers (`totals`). It therefore takes at least any weighted mean of
    them. A plan that fits does not exceed the memory, so adding price · (bytes needed / budget - 1) keeps a lower bound
    for any price >= 0. The total is a sum over layers, so its minimum lets each layer choose its own cheapest strategy.
    Subgradient steps approach the weights and prices with the highest bound (the Lagrangian dual).

    steps: maximum number of subgradient steps; with 0 only the single sums are used
    enough: value of the bound at which to stop
    """
    if not choices.strategies:
        return float("inf")
    sums, per_column = totals(outline, choices, machine)
    constants = per_column[:, 0]
    needs, budgets = _needs(outline, choices, sections, machine)
    times, rows = sections.counts, range(len(sections.kinds))

    def least(costs: Array) -> tuple[float, Array]:
        """Return the least total of `costs` [kinds, strategies] over all layers, and the strategy of each kind."""
        chosen = costs.argmin(1)
        return float(times @ costs[rows, chosen]), chosen

    if any(budget < 0 or least(need)[0] > budget for need, budget in zip(needs, budgets, strict=True)):
        return float("inf")
    alone = [least(total)[0] + constant for total, constant in zip(sums, constants, strict=True)]
    best = max(alone)
    if best >= enough or not steps:
        return best
    limited = [n for n, budget in enumerate(budgets) if 0 < budget < float("inf")]
    # As shares of the budget, so that prices are in seconds.
    relative = needs[limited] / np.array(budgets)[limited][:, None, None]
    weights, prices = np.zeros(len(sums)), np.zeros(len(limited))
    weights[int(np.argmax(alone))] = 1.0
    for _ in range(steps):
        costs = np.tensordot(weights, sums, 1)
        if limited:
            costs = costs + np.tensordot(prices, relative, 1)
        total, chosen = least(costs)
        bound = total + float(weights @ constants) - float(prices.sum())
        best = max(best, bound)
        if best >= enough:
            break
        uphill = sums[:, rows, chosen] @ times + constants
        over = relative[:, rows, chosen] @ times - 1 if limited else prices
        # Polyak's step length needs the optimum, which is unknown: use `enough`, or 5 % above the best bound.
        wanted = min(enough, 1.05 * best)
        # Weights sum to 1, so only the part of the gradient within that plane counts. A price of 0 cannot fall.
        tilted = uphill - uphill.mean()
        over_free = np.where((prices > 0) | (over > 0), over, 0.0)
        # `best**2` makes the seconds of `tilted` comparable with the shares of `over_free`.
        norm = float(tilted @ tilted) / best**2 + float(over_free @ over_free)
        if norm < 1e-12:
            break
        length = (wanted - bound) / norm
        weights = _on_simplex(weights + length * tilted / best**2)
        prices = np.maximum(0.0, prices + length * over_free)
    return best


def _on_simplex(point: Array) -> Array:
    """Return the point nearest to `point` whose coordinates are non-negative and sum to 1.

    Source: "Projection onto the probability simplex" (arXiv 1309.1541), algorithm 1.
    """
    falling = np.sort(point)[::-1]
    above = (1 - np.cumsum(falling)) / np.arange(1, len(point) + 1)
    last = np.nonzero(falling + above > 0)[0][-1]
    return np.maximum(point + above[last], 0.0)


def _needs(outline: PlanOutline, choices: Choices, sections: Sections, machine: Machine) -> tuple[Array, list[float]]:
    """Return (bytes needed per layer [2, kinds, strategies], bytes available), summed over places of the pp axis.

    The two moments are the step of the optimizer, and the beginning of the last backward. Summing over places drops the
    split into stages, and only makes it easier to fit.
    """
    pipeline, m, loads = outline.pipeline, outline.microbatches, choices.loads
    pp, stages = pipeline.pipeline_degree, pipeline.num_stages
    travelling = 2 * (stages - 1) * m * machine.tokens * float(choices.token_share.min())
    left = pp * machine.budget - travelling - machine.images * float(choices.image_share.min())
    working = 0.0
    # Without a pipeline the head's activations are freed before the backward of the last block begins.
    if pp == 1:
        # Of several kinds of blocks, that of the last block.
        last = sections.rows[-1]
        working = float((loads.working_once if m == 1 else loads.working)[last].min() - loads.saved[-1].max())
    # The last stage keeps the fewest micro-batches. Any layer could be there.
    return layer_sums(outline, loads, machine, stages - 1).layers[BYTES], [left, left - max(0.0, working)]
