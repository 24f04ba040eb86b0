"""Lower bound on the seconds of all plans of one outline, with any mix of strategies and any split.

It is a Lagrangian relaxation of time and memory, in which every layer chooses its strategy independently.
"""

from __future__ import annotations

import numpy as np

from vitpar.planner.search.bounds import BYTES, Machine, PlanOutline, in_flight, layer_sums, totals, working_bytes
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
    # The last block of a stage has a row of its own: its working memory is on top of what the stage keeps.
    last, apart = sections.rows[-1], outline.pipeline.pipeline_degree if sections.alike else 1
    sums = np.concatenate([sums, sums[:, [last]]], 1)
    times = np.append(sections.counts, apart)
    times[last] -= apart
    needs, budgets = _needs(outline, choices, machine, last)
    rows = range(len(times))

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


def _needs(outline: PlanOutline, choices: Choices, machine: Machine, last: int) -> tuple[Array, list[float]]:
    """Return (bytes needed per layer [3, kinds + 1, strategies], bytes available), as weighted sums over all stages.

    The moments are the step of the optimizer, and the beginning of the first and of the last backward of a stage's last
    block, whose row is the last one. Sums over stages drop the split, and only make it easier to fit. At the first
    backward, stages that keep more micro-batches count less, so that a layer's activations count alike in each.

    last: row of the kind of the model's last block
    """
    pipeline, m, loads = outline.pipeline, outline.microbatches, choices.loads
    stages, alive = pipeline.num_stages, np.array(in_flight(pipeline, m))
    # The last stage keeps the fewest micro-batches.
    layers, working = layer_sums(outline, loads, machine, stages - 1).layers, working_bytes(loads, m, int(alive[-1]))
    kept = loads.kept + loads.gathered + loads.gradients * (m > alive[0])
    needs = np.stack([layers[BYTES.start], loads.saved + kept / alive[0], layers[-1]])
    needs = np.concatenate([needs, needs[:, [last]]], 1)
    needs[1:, -1] += np.stack([working[0][last] / alive[0], working[1][last]])
    # The head is done before.
    needs[1:, -2] = loads.settled[-1] / alive[-1] + (1 - 1 / alive[-1]) * loads.saved[-1], loads.settled[-1]
    messages = m * machine.tokens * float(choices.token_share.min())
    images = machine.images * float(choices.image_share.min())
    left = pipeline.pipeline_degree * machine.budget - 2 * (stages - 1) * messages - images
    neighbours = 1.0 * (np.arange(stages) > 0) + (np.arange(stages) < stages - 1)
    first = ((machine.budget - neighbours * messages) / alive).sum() - images / alive[0]
    return needs, [left, float(first), left]
