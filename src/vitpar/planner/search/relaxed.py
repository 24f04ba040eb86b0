"""Lower bounds on the seconds of all plans of one kind, with any mix of strategies and any split.

- `least_seconds`: Lagrangian relaxation of time and memory, in which every layer chooses its strategy independently.
- `split_seconds`: the stages of a pipeline take complete blocks, each stage within its time and memory.
"""

from __future__ import annotations

import numpy as np

from vitpar.planner.search.bounds import BLOCK, LIMITED, Costs, Kind, Machine, in_flight, layer_sums
from vitpar.planner.search.options import Array, Choices
from vitpar.planner.search.sections import Sections
from vitpar.strategy import SCHEDULES

STEPS = 40
"""Maximum number of subgradient steps of `least_seconds`."""
SPLIT_STEPS = 12
"""Number of bisection steps of `split_seconds`."""
WEIGHTS = np.array(
    [list(row) for row in np.eye(7)]
    + [
        [t / 8 * (row == at) for at in range(5)] + [(8 - t) / 8 * (1 - last), (8 - t) / 8 * last]
        for t in range(1, 8)
        for last in (0, 1)
        for row in (0, 2, 3)
    ]
    + [[t / 4, *((4 - t) / 4 * (row == at) for at in (1, 2, 3, 4)), 0, 0] for t in range(1, 4) for row in (2, 3, 4)]
)
"""Dual weights that `_StageLimits.blocks` tries, [tries, rows of `LIMITED`]; each row sums to 1.

Single limits; a limit of time with one of memory; the computing of a stage with another limit of time.
"""


def least_seconds(
    kind: Kind,
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
    if not choices.options:
        return float("inf")
    sums, constants = _sums(kind, choices, sections, machine)
    needs, budgets = _needs(kind, choices, sections, machine)
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


def split_seconds(
    kind: Kind, choices: Choices, sections: Sections, machine: Machine, enough: float = float("inf")
) -> float:
    """Return a lower bound on the seconds of a step over every mix of `choices` and every split, one stage per rank.

    In a step of T seconds each stage can hold at most a certain number of blocks (`_StageLimits.blocks`). If the stages
    together cannot hold `depth` blocks, every plan takes longer than T. Bisection finds the largest such T, from below.

    enough: value of the bound at which to stop
    """
    stages = [_StageLimits(kind, choices, sections, machine, number) for number in range(kind.pipeline.num_stages)]
    depth = sections.depth
    hop = 2 * machine.action + 2 * machine.send(float(choices.token_share.min()))

    def possible(seconds: float) -> bool:
        """Return whether the stages may hold all blocks in a step of `seconds`."""
        # Every stage takes as many blocks as it can, the first one first. No other split holds more: a block more in an
        # earlier stage delays a stage by no more than one block of its own takes.
        dealt, there, back = 0, 0.0, 0.0
        for number, stage in enumerate(stages):
            most = stage.blocks(dealt, seconds - machine.norm, there, back)
            # Each of the later stages needs at least one block.
            most = min(most, depth - dealt - (len(stages) - 1 - number))
            if most < 1:
                return False
            forward, both = stage.each(dealt, most)
            dealt += most
            there, back = there + forward + hop / 2, back + both - forward + hop / 2
        return dealt >= depth

    high = min(enough, 4 * least_seconds(kind, choices, sections, machine, steps=0))
    if high == float("inf") or not possible(high):
        return high
    low = 0.0
    for _ in range(SPLIT_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low


class _StageLimits:
    """Maximum number of blocks of stage `number` within given seconds and the memory of a rank."""

    def __init__(self, kind: Kind, choices: Choices, sections: Sections, machine: Machine, number: int) -> None:
        found, last = layer_sums(kind, choices, machine, number), kind.pipeline.num_stages - 1
        layers = found.layers[LIMITED]
        start, end = layers[:, 0] * (number == 0), layers[:, -1] * (number == last)
        start[5:] += found.besides
        end[-1] += found.working[list(set(sections.rows))].min(0)
        self._layers, self._rows, self._alike = layers, np.array(sections.rows), sections.alike
        self._ends = start.min(1) + end.min(1)
        m = kind.microbatches
        # A stage runs 2m actions; the bounds of rows 2 and 3 leave out one of them.
        self._ends[:4] += machine.action * np.array([2 * m, 2 * m, 2 * m - 1, 2 * m - 1])
        self._budget = machine.budget
        costs = Costs(choices, machine)
        self._forward, self._work = costs.forward.min(1)[self._rows], costs.work.min(1)[self._rows]

    def each(self, first: int, blocks: int) -> tuple[float, float]:
        """Return the least seconds of a micro-batch in blocks from `first` on: (forward, forward and backward)."""
        if self._alike:
            return blocks * float(self._forward[0]), blocks * float(self._work[0])
        inside = slice(first, first + blocks)
        return float(self._forward[inside].sum()), float(self._work[inside].sum())

    def blocks(self, first: int, seconds: float, there: float, back: float) -> int:
        """Return an upper bound on the number of blocks of the stage in a step of `seconds`, within the rank's memory.

        The number of blocks with any mix of strategies is at most the optimum of a linear program. Dual solutions bound
        it: for any weights of the limits that sum to 1, each block takes at least the least weighted share of them
        over strategies, and all blocks take at most 1.

        first: number of the stage's first block
        there: seconds of the step before the stage's first micro-batch arrives
        back: seconds of the step after its last one has left
        """
        limits = [seconds - there - back, *[seconds - there] * 3, seconds, self._budget, self._budget]
        left = np.array(limits) - self._ends
        if (left <= 0).any():
            return 0
        if self._alike:
            shares = self._layers[:, BLOCK] / left[:, None]
            least = (WEIGHTS @ shares).min(1).max()
            return int(1 / least + 1e-9) if least > 1e-9 else 10**9
        shares = self._layers / left[:, None, None]
        least = np.tensordot(WEIGHTS, shares, 1).min(2)  # [weights, kinds]
        return int((least[:, self._rows[first:]].cumsum(1) <= 1 + 1e-9).all(0).sum())


def _on_simplex(point: Array) -> Array:
    """Return the point nearest to `point` whose coordinates are non-negative and sum to 1.

    Source: "Projection onto the probability simplex" (arXiv 1309.1541), algorithm 1.
    """
    falling = np.sort(point)[::-1]
    above = (1 - np.cumsum(falling)) / np.arange(1, len(point) + 1)
    last = np.nonzero(falling + above > 0)[0][-1]
    return np.maximum(point + above[last], 0.0)


def _sums(kind: Kind, choices: Choices, sections: Sections, machine: Machine) -> tuple[Array, Array]:
    """Return lower bounds on the seconds of a step: (seconds per layer, constants).

    Seconds are an array [bounds, kinds, strategies]. A bound is its constant plus the sum over embed, blocks, head.
    """
    pipeline, m = kind.pipeline, kind.microbatches
    pp, costs = pipeline.pipeline_degree, Costs(choices, machine)
    if pp == 1:
        found = [(layers, m * machine.overhead) for layers in costs.unpipelined(m, machine.overlap)]
    else:
        found = _pipelined_sums(kind, choices, sections, machine, costs)
    return np.stack([total for total, _ in found]), np.array([constant for _, constant in found]) + machine.norm


def _pipelined_sums(
    kind: Kind, choices: Choices, sections: Sections, machine: Machine, costs: Costs
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
    pipeline, m = kind.pipeline, kind.microbatches
    pp, stages, schedule = pipeline.pipeline_degree, pipeline.num_stages, SCHEDULES[pipeline.schedule]
    send = machine.send(float(choices.token_share.min()))
    optimizer, actions = costs.optimizer / pp, 2 * machine.action
    late = costs.late if schedule.splits_backward else 0.0
    one = schedule.stages == "one"
    late_sent, early = (costs.sent_late, costs.sent_early) if one else (0.0, 0.0)
    # The mean over ranks is at most the maximum: sums over all layers divided by pp bound the fullest rank.
    found = [
        ((m * costs.work + costs.waits_once) / pp + optimizer, m * actions * stages / pp),
        ((m * costs.sent_each + costs.sent_once) / pp + optimizer, 0.0),
        (((m - 1) * costs.work + costs.forward + late_sent) / pp + optimizer, (m - 1) * actions * stages / pp),
        ((m * costs.work - costs.forward + early + costs.waits_once) / pp + optimizer, 0.0),
        (costs.work - late - costs.forward + early + optimizer, 0.0),
        (costs.work - late + optimizer, actions * stages + 2 * (stages - 1) * send),
        (m * costs.work * machine.speed / machine.lanes, m * actions * stages * machine.speed / machine.lanes),
    ]
    if schedule.stages == "one":
        # Stage j gives: step >= w_0 + … + w_(j-1) + m·w_j. These weights sum to 1, and in the weighted mean each w_i
        # has the same factor `every`.
        every = 1 / (1 - (1 - 1 / m) ** pp)
        weights = [every / m * (1 - 1 / m) ** (pp - 1 - j) for j in range(pp)]
        sends = sum(2 * j * weight for j, weight in enumerate(weights)) * send
        found.append((every * costs.work, every * actions * stages + sends))
        alive = in_flight(pipeline, m)[0]
        found.append((m / alive * costs.work + optimizer, m / alive * (actions * stages + 2 * (pp - 1) * send)))
    elif sections.alike:
        least = sections.depth // stages / sections.depth
        hops = (pp - 1) * (1 if schedule.splits_backward else 2)
        before = costs.forward if schedule.splits_backward else costs.work
        blocks = least * ((pp - 1) * before + m * pipeline.virtual_stages * costs.work)
        blocks[[0, 2]] = 0.0
        found.append((blocks, hops * send))
    return found


def _needs(kind: Kind, choices: Choices, sections: Sections, machine: Machine) -> tuple[Array, list[float]]:
    """Return (bytes needed per layer [2, kinds, strategies], bytes available), summed over places of the pp axis.

    The two moments are the step of the optimizer, and the beginning of the last backward. Summing over places drops the
    split into stages, and only makes it easier to fit.
    """
    pipeline, m, a = kind.pipeline, kind.microbatches, choices.loads
    pp = pipeline.pipeline_degree
    # Under other schedules than gpipe the last stage keeps one micro-batch. Any layer could be there.
    alive = m if pipeline.schedule == "gpipe" else 1
    waiting = a["gradients"] if pp == 1 and m > 1 else 0.0
    travelling = 2 * (pipeline.num_stages - 1) * m * machine.tokens * float(choices.token_share.min())
    left = pp * machine.budget - travelling - machine.images * float(choices.image_share.min())
    working = 0.0
    # Without a pipeline the head's activations are freed before the backward of the last block begins.
    if pp == 1:
        # Of several kinds of blocks, that of the last block.
        last = sections.rows[-1]
        working = float(a["working_once" if m == 1 else "working"][last].min() - a["saved"][-1].max())
    busy = a["kept"] + a["gathered"] + waiting + alive * a["saved"]
    return np.stack([a["kept"] + a["reduced"], busy]), [left, left - max(0.0, working)]
