"""Lower bounds on the seconds of all plans of one kind, with any mix of strategies and any split.

- `least_seconds`: layers choose their strategies one by one, as a price of time and memory asks for.
- `split_seconds`: whole blocks are dealt to the stages of a pipeline, each within its time and memory.
"""

from __future__ import annotations

import numpy as np

from vitpar.planner.search.bounds import BLOCK, LIMITED, Costs, Kind, Machine, in_flight, stage_sums
from vitpar.planner.search.options import Array, Choices
from vitpar.strategy import SCHEDULES

STEPS = 40
"""Steps of the relaxation, at most."""
SPLIT_STEPS = 12
"""Halvings of the seconds that a split takes."""
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
"""Weights of the limited rows that are tried together."""


def least_seconds(
    kind: Kind,
    choices: Choices,
    depth: int,
    machine: Machine,
    *,
    steps: int = STEPS,
    enough: float = float("inf"),
) -> float:
    """Return the seconds of a step that no plan of the kind is faster than, whatever mix of `choices` its layers have;
    infinite where none fits into memory.

    A step takes at least each of several sums over layers (`_sums`), and layers need no more memory than there is.
    Each layer is relaxed to choose for itself what is best for a weighted mean of these sums plus a price of memory
    (Lagrange): the weights and prices that give the highest bound are approached by subgradients. Any weights bound.

    steps: of that. enough: a bound that high needs no improvement.
    """
    if not choices.options:
        return float("inf")
    sums, constants = _sums(kind, choices, depth, machine)
    needs, budgets = _needs(kind, choices, machine)
    times = np.array([1.0, depth, 1.0])

    def least(costs: Array) -> tuple[float, Array]:
        """The least total of costs [3, strategies], and the strategy of each row of layers that has it."""
        chosen = costs.argmin(1)
        return float(times @ costs[range(3), chosen]), chosen

    if any(budget < 0 or least(need)[0] > budget for need, budget in zip(needs, budgets, strict=True)):
        return float("inf")
    alone = [least(total)[0] + constant for total, constant in zip(sums, constants, strict=True)]
    best = max(alone)
    if best >= enough or not steps:
        return best
    limited = [n for n, budget in enumerate(budgets) if 0 < budget < float("inf")]
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
        uphill = sums[:, range(3), chosen] @ times + constants
        over = relative[:, range(3), chosen] @ times - 1 if limited else prices
        # A step towards a value that is not known: what is wanted, or somewhat above the best bound.
        wanted = min(enough, 1.05 * best)
        tilted = uphill - uphill.mean()
        over_free = np.where((prices > 0) | (over > 0), over, 0.0)
        norm = float(tilted @ tilted) / best**2 + float(over_free @ over_free)
        if norm < 1e-12:
            break
        length = (wanted - bound) / norm
        weights = _on_simplex(weights + length * tilted / best**2)
        prices = np.maximum(0.0, prices + length * over_free)
    return best


def split_seconds(kind: Kind, choices: Choices, depth: int, machine: Machine, enough: float = float("inf")) -> float:
    """Return the seconds of a step that no plan of the kind, with one stage a rank, is faster than: whole blocks are
    dealt to stages, and every stage fits into memory.

    For a step of T seconds every stage can have at most so many blocks (`_most_blocks`). If all stages together cannot
    have `depth` blocks, all plans take longer; the largest such T is approached from below. enough: as in
    `least_seconds`.
    """
    stages = [_StageLimits(kind, choices, machine, number) for number in range(kind.pipeline.num_stages)]
    hop = 2 * machine.action + 2 * machine.send(float(choices.token_share.min()))

    def possible(seconds: float) -> bool:
        dealt, there, back = 0, 0.0, 0.0
        for number, stage in enumerate(stages):
            most = stage.blocks(seconds - machine.norm, there, back)
            # The stages behind need a block each.
            most = min(most, depth - dealt - (len(stages) - 1 - number))
            if most < 1:
                return False
            dealt += most
            forward, both = stage.each(most)
            there, back = there + forward + hop / 2, back + both - forward + hop / 2
        return dealt >= depth

    high = min(enough, 4 * least_seconds(kind, choices, depth, machine, steps=0))
    if high == float("inf") or not possible(high):
        return high
    low = 0.0
    for _ in range(SPLIT_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low


class _StageLimits:
    """How many blocks stage `number` of a kind can have at most."""

    def __init__(self, kind: Kind, choices: Choices, machine: Machine, number: int) -> None:
        block, start, end = stage_sums(kind, choices, machine, number)
        self._block = block[LIMITED]
        self._ends = start[LIMITED].min(1) + end[LIMITED].min(1)
        m = kind.microbatches
        self._ends[:4] += machine.action * np.array([2 * m, 2 * m, 2 * m - 1, 2 * m - 1])
        self._budget = machine.budget
        costs = Costs(choices, machine)
        self._forward, self._work = float(costs.forward[BLOCK].min()), float(costs.work[BLOCK].min())

    def each(self, blocks: int) -> tuple[float, float]:
        """Seconds of a micro-batch through so many blocks, at least: forward, and both ways."""
        return blocks * self._forward, blocks * self._work

    def blocks(self, seconds: float, there: float, back: float) -> int:
        """The most blocks that a rank can run in so many seconds of a step, within its memory. there, back: of these,
        before its first micro-batch comes, and after its last one has left.

        Blocks with different strategies in any proportion are as many as a linear program allows; by its duality, not
        more than 1 / the least share of a weighted mean of all limits that a block takes, for any weights.
        """
        limits = [seconds - there - back, *[seconds - there] * 3, seconds, self._budget, self._budget]
        left = np.array(limits) - self._ends
        if (left <= 0).any():
            return 0
        shares = self._block / left[:, None]
        least = (WEIGHTS @ shares).min(1).max()
        return int(1 / least + 1e-9) if least > 1e-9 else 10**9


def _on_simplex(point: Array) -> Array:
    """The nearest weights that are not negative and add up to 1.

    Source: "Projection onto the probability simplex" (arXiv 1309.1541), algorithm 1.
    """
    falling = np.sort(point)[::-1]
    above = (1 - np.cumsum(falling)) / np.arange(1, len(point) + 1)
    last = np.nonzero(falling + above > 0)[0][-1]
    return np.maximum(point + above[last], 0.0)


def _sums(kind: Kind, choices: Choices, depth: int, machine: Machine) -> tuple[Array, Array]:
    """Ways to bound the seconds of a step from below: each a sum over layers, [ways, 3, strategies], and a constant."""
    pipeline, m = kind.pipeline, kind.microbatches
    pp, costs = pipeline.pipeline_degree, Costs(choices, machine)
    if pp == 1:
        found = [(layers, m * machine.overhead) for layers in costs.unpipelined(m, machine.overlap)]
    else:
        found = _pipelined_sums(kind, choices, depth, machine, costs)
    return np.stack([total for total, _ in found]), np.array([constant for _, constant in found]) + machine.norm


def _pipelined_sums(
    kind: Kind, choices: Choices, depth: int, machine: Machine, costs: Costs
) -> list[tuple[Array, float]]:
    """Those of a pipeline.

    - Of pp ranks one has at least its share of all work, of what is sent in the background, and of what is done once.
    - A micro-batch goes through all layers and back, one after the other.
    - All work is done by as many ranks at a time as there are cores.
    - One stage a rank: stage j begins after the stages before it, which end after it. The least step has all these
      bounds equal: they are added up with weights that count every stage as often. And all micro-batches stay between
      their first forward and last backward, as many at a time as the first stage keeps.
    - Several, even stages a rank: the last rank begins after pp - 1 stages.
    """
    pipeline, m = kind.pipeline, kind.microbatches
    pp, stages, schedule = pipeline.pipeline_degree, pipeline.num_stages, SCHEDULES[pipeline.schedule]
    send = machine.send(float(choices.token_share.min()))
    optimizer, actions = costs.optimizer / pp, 2 * machine.action
    late = costs.late if schedule.splits_backward else 0.0
    one = schedule.stages == "one"
    late_sent, early = (costs.sent_late, costs.sent_early) if one else (0.0, 0.0)
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
        every = 1 / (1 - (1 - 1 / m) ** pp)
        weights = [every / m * (1 - 1 / m) ** (pp - 1 - j) for j in range(pp)]
        sends = sum(2 * j * weight for j, weight in enumerate(weights)) * send
        found.append((every * costs.work, every * actions * stages + sends))
        alive = in_flight(pipeline, m)[0]
        found.append((m / alive * costs.work + optimizer, m / alive * (actions * stages + 2 * (pp - 1) * send)))
    else:
        least = depth // stages / depth
        hops = (pp - 1) * (1 if schedule.splits_backward else 2)
        before = costs.forward if schedule.splits_backward else costs.work
        blocks = least * ((pp - 1) * before + m * pipeline.virtual_stages * costs.work)
        blocks[[0, 2]] = 0.0
        found.append((blocks, hops * send))
    return found


def _needs(kind: Kind, choices: Choices, machine: Machine) -> tuple[Array, list[float]]:
    """Bytes that layers need, added up over the places of the pp axis, [2, 3, strategies], and how many there are: when
    the optimizer steps, and when the last backward begins."""
    pipeline, m, a = kind.pipeline, kind.microbatches, choices.loads
    pp = pipeline.pipeline_degree
    alive = m if pipeline.schedule == "gpipe" else 1  # of the stage that keeps least
    waiting = a["gradients"] if pp == 1 and m > 1 else 0.0
    travelling = 2 * (pipeline.num_stages - 1) * m * machine.tokens * float(choices.token_share.min())
    left = pp * machine.budget - travelling - machine.images * float(choices.image_share.min())
    working = 0.0
    if pp == 1:  # the head's backward is done when that of the last block begins
        working = float(a["working_once" if m == 1 else "working"][BLOCK].min() - a["saved"][2].max())
    busy = a["kept"] + a["gathered"] + waiting + alive * a["saved"]
    return np.stack([a["kept"] + a["reduced"], busy]), [left, left - max(0.0, working)]
