"""Lower bound on the seconds of all plans of one outline, with any mix of strategies and any split.

It is a Lagrangian relaxation of time and memory, in which every layer chooses its strategy independently.
"""

from __future__ import annotations

import numpy as np

from vitpar.planner.search.bounds import Costs, Machine, PlanOutline, in_flight, queueing, rounds
from vitpar.planner.search.loads import Array
from vitpar.planner.search.options import Choices
from vitpar.planner.search.sections import Sections
from vitpar.strategy import SCHEDULES

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

    A step takes at least each of several sums over layers (`_sums`). It therefore takes at least any weighted mean of
    them. A plan that fits does not exceed the memory, so adding price · (bytes needed / budget - 1) keeps a lower bound
    for any price >= 0. The total is a sum over layers, so its minimum lets each layer choose its own cheapest strategy.
    Subgradient steps approach the weights and prices with the highest bound (the Lagrangian dual).

    steps: maximum number of subgradient steps; with 0 only the single sums are used
    enough: value of the bound at which to stop
    """
    if not choices.strategies:
        return float("inf")
    sums, constants = _sums(outline, choices, sections, machine)
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


def _sums(outline: PlanOutline, choices: Choices, sections: Sections, machine: Machine) -> tuple[Array, Array]:
    """Return lower bounds on the seconds of a step: (seconds per layer, constants).

    Seconds are an array [bounds, kinds, strategies]. A bound is its constant plus the sum over embed, blocks, head.
    """
    pipeline, m = outline.pipeline, outline.microbatches
    pp, costs = pipeline.pipeline_degree, Costs(choices, machine)
    if pp == 1:
        sums = [(layers, m * machine.overhead) for layers in costs.unpipelined(m, machine.overlap)]
    else:
        sums = _pipelined_sums(outline, choices, sections, machine, costs)
    return np.stack([total for total, _ in sums]), np.array([constant for _, constant in sums]) + machine.norm


def _pipelined_sums(
    outline: PlanOutline, choices: Choices, sections: Sections, machine: Machine, costs: Costs
) -> list[tuple[Array, float]]:
    """Return the bounds of `_sums` for a pipeline, as (seconds per layer [kinds, strategies], constant) each.

    - One of the pp ranks has at least the mean work, background communication and waiting once per step.
    - A micro-batch passes through all layers, forward and backward, one after the other.
    - All ranks together compute at most as fast as `Machine.lanes` ranks.
    - One stage per rank: stage j starts after the earlier stages, which finish after it. A weighted mean of the stages'
      bounds that counts the work of every stage equally depends on the sum over layers only, not on the split.
    - One stage per rank: at most as many micro-batches as the first stage keeps are between their first forward and
      last backward at a time.
    - Several even stages per rank, of blocks that are alike: the last rank starts after the first pp - 1 stages.
    """
    pipeline, m = outline.pipeline, outline.microbatches
    pp, stages, schedule = pipeline.pipeline_degree, pipeline.num_stages, SCHEDULES[pipeline.schedule]
    hops = machine.hops(float(choices.token_share.min()))
    optimizer, actions = costs.optimizer / pp, 2 * machine.action
    sent = np.array(hops.each)
    block = costs.work[1:-1].min() + actions
    queue = (
        float(queueing(outline, sent, np.full(stages, block)).max())
        if schedule.stages == "one"
        else (m - 1) * max(sent)
    )
    late = costs.late if schedule.splits_backward else 0.0
    one = schedule.stages == "one"
    late_sent, early = (costs.sent_late, costs.sent_early) if one else (0.0, 0.0)
    # The mean over ranks is at most the maximum: sums over all layers divided by pp bound the fullest rank.
    sums = [
        ((m * costs.work + costs.waits_once) / pp + optimizer, m * actions * stages / pp),
        ((m * costs.sent_each + costs.sent_once) / pp + optimizer, 0.0),
        (((m - 1) * costs.work + costs.forward + late_sent) / pp + optimizer, (m - 1) * actions * stages / pp),
        ((m * costs.work - costs.forward + early + costs.waits_once) / pp + optimizer, 0.0),
        (costs.work - late - costs.forward + early + optimizer, 0.0),
        (costs.work - late + optimizer, actions * stages + 2 * sent.sum() + queue),
        (0.0 * optimizer, m * hops.busiest),
        (m * costs.work * machine.speed / machine.lanes, m * actions * stages * machine.speed / machine.lanes),
    ]
    if schedule.stages == "one":
        # Stage j gives: step >= w_0 + … + w_(j-1) + m·w_j. These weights sum to 1, and in the weighted mean each w_i
        # has the same factor `every`.
        every = 1 / (1 - (1 - 1 / m) ** pp)
        weights = every / m * (1 - 1 / m) ** (pp - 1 - np.arange(pp))
        sends = 2 * float(weights @ np.concatenate([[0.0], np.cumsum(sent)]))
        sums.append((every * costs.work, every * actions * stages + sends))
        if pipeline.schedule == "1f1b":
            # The cycle of two stages (`queueing`) with the work of all other stages, each counted equally.
            every = 2 * int(rounds(outline)[0])
            sums.append((every * costs.work / pp, every * (actions + 2 * max(sent) / pp)))
        alive = in_flight(pipeline, m)[0]
        sums.append((m / alive * costs.work + optimizer, m / alive * (actions * stages + 2 * sent.sum())))
    elif sections.alike:
        least = sections.depth // stages / sections.depth
        before = costs.forward if schedule.splits_backward else costs.work
        blocks = least * ((pp - 1) * before + m * pipeline.virtual_stages * costs.work)
        blocks[[0, 2]] = 0.0
        sums.append((blocks, 0.0))
    return sums


def _needs(outline: PlanOutline, choices: Choices, sections: Sections, machine: Machine) -> tuple[Array, list[float]]:
    """Return (bytes needed per layer [2, kinds, strategies], bytes available), summed over places of the pp axis.

    The two moments are the step of the optimizer, and the beginning of the last backward. Summing over places drops the
    split into stages, and only makes it easier to fit.
    """
    pipeline, m, a = outline.pipeline, outline.microbatches, choices.loads
    pp = pipeline.pipeline_degree
    # Under other schedules than gpipe the last stage keeps one micro-batch. Any layer could be there.
    alive = m if pipeline.schedule == "gpipe" else 1
    waiting = a.gradients if pp == 1 and m > 1 else 0.0
    travelling = 2 * (pipeline.num_stages - 1) * m * machine.tokens * float(choices.token_share.min())
    left = pp * machine.budget - travelling - machine.images * float(choices.image_share.min())
    working = 0.0
    # Without a pipeline the head's activations are freed before the backward of the last block begins.
    if pp == 1:
        # Of several kinds of blocks, that of the last block.
        last = sections.rows[-1]
        working = float((a.working_once if m == 1 else a.working)[last].min() - a.saved[-1].max())
    busy = a.kept + a.gathered + waiting + alive * a.saved
    return np.stack([a.kept + a.reduced, busy]), [left, left - max(0.0, working)]
