"""Lower bounds on the seconds and bytes of plans of one kind: a pipeline with its micro-batches, whatever the
strategies of its layers are.

A search skips what cannot beat the best plan so far, so every bound here has to hold for the price that
``vitpar.planner.cost.price`` would give. Two sets of plans are bounded:

- `uniform_bounds`: each plan with one strategy for all layers and even stages, by arrays over strategies.
- `least_seconds`: all plans, with any mix of strategies and any split, by a relaxation (below).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitpar.planner.search.options import Choices
from vitpar.strategy import SCHEDULES, Plan
from vitpar.strategy.stages import split_blocks, stages_of_rank

Array = NDArray[np.float64]
STEPS = 40
"""Steps of the relaxation, at most."""
SPLIT_STEPS = 12
"""Halvings of the seconds that a split takes."""
TIMES, EACH, BYTES = slice(0, 5), 5, slice(6, 8)
LIMITED = [0, 1, 2, 3, 4, 6, 7]
"""Rows of `stage_sums`: seconds of a step, seconds of a micro-batch, bytes; and those that a limit is set to."""
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
BLOCK = 1
"""Row of blocks in arrays by kind of layer; stem and head are around it."""


@dataclass(frozen=True)
class Kind:
    """pipeline: degree, schedule and virtual stages, without layers."""

    pipeline: Plan
    batch_size: int
    microbatches: int

    @property
    def rows(self) -> int:
        """Images of a micro-batch."""
        return self.batch_size // self.microbatches


@dataclass(frozen=True)
class Machine:
    """Rates of a rank in plans of one kind, at best.

    alone, sending: how many times longer than profiled it computes with a core for itself, and waits for what is sent.
    speed: the part of a core it gets while ranks share cores. lanes: how many places of the pp axis compute at full
    speed at a time. overhead: seconds of a micro-batch without a pipeline, besides its layers. action: seconds of each
    action of a pipeline, besides its layers. norm: seconds of a step to agree on the gradients' norm. overlap: how many
    times longer computing and sending take beside each other. send: seconds to send a share of a micro-batch's tokens
    to the next stage. budget: bytes of memory for the model. images, tokens: bytes of the batch, and of a micro-batch's
    tokens.
    """

    alone: float = 1.0
    sending: float = 1.0
    speed: float = 1.0
    lanes: float = float("inf")
    overhead: float = 0.0
    action: float = 0.0
    norm: float = 0.0
    overlap: tuple[float, float] = (1.0, 1.0)
    send: Callable[[float], float] = lambda share: 0.0
    budget: float = float("inf")
    images: float = 0.0
    tokens: float = 0.0


class _Costs:
    """Arrays of a kind's strategies, by row of layers (stem, block, head): seconds of a micro-batch and of a step."""

    def __init__(self, choices: Choices, machine: Machine) -> None:
        a, slow = choices.loads, machine.sending / machine.speed
        self.computes = a["computes"] * (machine.alone / machine.speed)
        self.forward = a["forward"] * (machine.alone / machine.speed)
        self.late = a["late"] * (machine.alone / machine.speed)
        self.waits = a["waits"] * slow
        self.work = self.computes + self.waits
        self.optimizer = a["once"]
        self.edge = a["edge"]
        self.waits_once = a["waits_once"] * slow
        self.sent_each, self.sent_once = a["sent_each"], a["sent_once"]
        self.sent_early, self.sent_late = a["sent_early"], a["sent_late"]

    def unpipelined(self, m: int, overlap: tuple[float, float]) -> list[Array]:
        """Sums over layers that a step of `m` micro-batches without a pipeline takes at least.

        While x seconds pass in which computing, C seconds, and sending, S seconds, both go on, x / slow_c of C and
        x / slow_s of S are done. So both take C + S - k·x with k = 1 / slow_c + 1 / slow_s - 1, where x is at most
        slow_c·C and at most slow_s·S: a sum for either. The third: gradients are sent from the last backward on.
        """
        compute, send = overlap
        k = max(0.0, 1 / compute + 1 / send - 1)
        blocking = m * self.waits + self.waits_once + self.optimizer + self.edge
        computing, sent = m * self.computes, m * self.sent_each + self.sent_once - self.edge
        before = (m - 1) * self.computes + self.forward
        return [
            blocking + (1 - k * compute) * computing + sent,
            blocking + computing + (1 - k * send) * sent,
            blocking + before + np.maximum(0.0, self.sent_late - self.edge),
        ]


def stage_sums(kind: Kind, choices: Choices, machine: Machine, number: int) -> tuple[Array, Array, Array]:
    """Return what a block, what comes before the first and what comes behind the last block of stage `number` takes
    under every strategy, [sums, strategies] each.

    The sums are: seconds of a step from the stage's first micro-batch until its last one is back at the first stage,
    and the optimizer's; seconds of a step from the first micro-batch on, with what the rank waits for after the last
    one; the same with gradients that are sent from the last backward on, and with parameters that the first forward
    waits for; seconds of what is sent in the background; seconds of a micro-batch; bytes when the optimizer steps; bytes when the
    last backward begins. Without a pipeline the first are
    `_Costs.unpipelined`.
    """
    pipeline, m, a = kind.pipeline, kind.microbatches, choices.loads
    costs, pp = _Costs(choices, machine), pipeline.pipeline_degree
    if pp == 1:
        times = costs.unpipelined(m, machine.overlap)
        times += times[:2]
    else:
        computing, sent = m * costs.work + costs.optimizer, m * costs.sent_each + costs.sent_once
        late = (m - 1) * costs.work + costs.forward + costs.sent_late + costs.optimizer
        once = computing + costs.waits_once
        times = [computing, once, late, once - costs.forward + costs.sent_early, sent + costs.optimizer]
    alive = in_flight(pipeline, m)[number]
    waiting = m > (1 if pp == 1 else alive)  # gradients of micro-batches before
    busy = a["kept"] + a["gathered"] + a["gradients"] * waiting + alive * a["saved"]
    layers = np.stack([*times, costs.work, a["kept"] + a["reduced"], busy])
    last = pipeline.num_stages - 1
    stem, block, head = layers[:, 0] * (number == 0), layers[:, BLOCK], layers[:, 2] * (number == last)
    hops = (number > 0) + (number < last)
    bytes_besides = hops * m * machine.tokens * choices.token_share.min() + (number == 0) * machine.images * float(
        choices.image_share.min()
    )
    stem[BYTES] += bytes_besides
    # When the last block's backward begins, the head's is done.
    working = a["working_once"][BLOCK] if m == 1 else a["working"][BLOCK] + a["fresh"][BLOCK] * (not waiting)
    head[-1] += np.maximum(0.0, working - a["saved"][2] * (number == last))
    return block, stem, head


def uniform_bounds(kind: Kind, choices: Choices, depth: int, machine: Machine) -> tuple[Array, Array]:
    """Return (seconds of a step, bytes of the fullest rank) that plans with one strategy take at least, by strategy."""
    pipeline, m = kind.pipeline, kind.microbatches
    sizes = [len(blocks) for blocks in split_blocks(depth, pipeline.num_stages, "even")]
    counts = np.array([[number == 0, size, number == len(sizes) - 1] for number, size in enumerate(sizes)], float)
    costs = _Costs(choices, machine)
    if pipeline.pipeline_degree == 1:
        sums = [(counts @ layers)[0] for layers in costs.unpipelined(m, machine.overlap)]
        seconds = m * machine.overhead + np.max(sums, axis=0)
    elif pipeline.virtual_stages == 1:
        seconds = _one_stage_a_rank(costs, choices, counts, kind, machine)
    else:
        seconds = _several_stages_a_rank(costs, choices, counts, kind, machine)
    return seconds + machine.norm, _uniform_bytes(kind, choices, counts, machine)


def _one_stage_a_rank(costs: _Costs, choices: Choices, counts: Array, kind: Kind, machine: Machine) -> Array:
    """1f1b and gpipe: stage j works on m micro-batches after the first one came through the stages before it, and the
    last one has to go back through them.

    Of the micro-batches, stage j keeps at most as many between forward and backward as its schedule lets it; each stays
    until it is back from the stages behind. So those stays, added up, pass no faster than that many at a time.
    """
    m, send = kind.microbatches, choices.by_share(machine.send)
    work = counts @ costs.work + 2 * machine.action
    forward = counts @ costs.forward + machine.action
    number = np.arange(len(counts))[:, None]
    first = np.maximum(forward, counts @ costs.sent_early)  # gathers what the others find gathered
    there = np.cumsum(first, 0) - first + number * send
    slower = first - forward
    back = np.cumsum(work - forward, 0) - (work - forward) + number * send
    optimizer, once = counts @ costs.optimizer, counts @ costs.waits_once
    behind = np.cumsum(work[::-1], 0)[::-1] + 2 * (len(counts) - 1 - number) * send
    alive = np.array(in_flight(kind.pipeline, m), float)[:, None]
    found = [
        there + back + slower + m * work + optimizer,
        there + slower + m * work + once + optimizer,
        there + slower + (m - 1) * work + forward + counts @ costs.sent_late + optimizer,
        there + back + m / alive * behind + optimizer,
        counts @ (m * costs.sent_each + costs.sent_once) + optimizer,
        np.broadcast_to(m * work.sum(0) * machine.speed / machine.lanes, work.shape),
    ]
    return np.asarray(np.max(found, axis=(0, 1)))


def _several_stages_a_rank(costs: _Costs, choices: Choices, counts: Array, kind: Kind, machine: Machine) -> Array:
    """A rank works on m micro-batches of each of its stages; the last rank begins after those before it."""
    pipeline, m, send = kind.pipeline, kind.microbatches, choices.by_share(machine.send)
    pp = pipeline.pipeline_degree
    places = np.zeros((pp, len(counts)))
    for place in range(pp):
        places[place, list(stages_of_rank(place, pipeline))] = 1
    work = counts @ costs.work + 2 * machine.action
    forward = counts @ costs.forward + machine.action
    before = forward[: pp - 1].sum(0) if pipeline.splits_backward else work[: pp - 1].sum(0)
    hops = (pp - 1) * (1 if pipeline.splits_backward else 2)
    optimizer = places @ counts @ costs.optimizer
    found = [
        m * places @ work + places @ counts @ costs.waits_once + optimizer,
        np.broadcast_to(before + hops * send + (m * places @ work + optimizer)[-1], optimizer.shape),
        places @ counts @ (m * costs.sent_each + costs.sent_once) + optimizer,
        np.broadcast_to(m * work.sum(0) * machine.speed / machine.lanes, optimizer.shape),
    ]
    return np.asarray(np.max(found, axis=(0, 1)))


def _uniform_bytes(kind: Kind, choices: Choices, counts: Array, machine: Machine) -> Array:
    pipeline, m, a = kind.pipeline, kind.microbatches, choices.loads
    last = len(counts) - 1
    number = np.arange(len(counts))[:, None]
    travelling = m * machine.tokens * choices.token_share * ((number > 0) * 1.0 + (number < last))
    held = counts @ a["kept"] + travelling + (number == 0) * machine.images * choices.image_share
    saved, gathered, gradients = counts @ a["saved"], counts @ a["gathered"], counts @ a["gradients"]
    resting = held + counts @ a["reduced"]
    if pipeline.virtual_stages > 1:
        places = [list(stages_of_rank(place, pipeline)) for place in range(pipeline.pipeline_degree)]
        busy = [held[p].sum(0) + gathered[p].sum(0) + saved[p].sum(0) for p in places]
        return np.asarray(np.max([*busy, *(resting[p].sum(0) for p in places)], axis=0))
    alive = np.array(in_flight(pipeline, m))[:, None]
    again = m > (1 if pipeline.pipeline_degree == 1 else alive)  # gradients wait while more micro-batches come
    blocks = alive * saved - counts[:, 2:] * a["saved"][2]
    if m == 1:
        working = a["working_once"][BLOCK]
    else:
        working = a["working"][BLOCK] + np.where(again, gradients, a["fresh"][BLOCK])
    busy_bytes = held + gathered + blocks + working
    return np.asarray(np.maximum(resting, busy_bytes).max(0))


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
        costs = _Costs(choices, machine)
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
    pp, costs = pipeline.pipeline_degree, _Costs(choices, machine)
    if pp == 1:
        found = [(layers, m * machine.overhead) for layers in costs.unpipelined(m, machine.overlap)]
    else:
        found = _pipelined_sums(kind, choices, depth, machine, costs)
    return np.stack([total for total, _ in found]), np.array([constant for _, constant in found]) + machine.norm


def _pipelined_sums(
    kind: Kind, choices: Choices, depth: int, machine: Machine, costs: _Costs
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


def ideal_seconds(kind: Kind, image_seconds: float, machine: Machine) -> float:
    """Return the seconds of a step, were nothing sent and no memory needed. image_seconds: that an image costs a rank in
    all blocks, at least."""
    pp, m, work = kind.pipeline.pipeline_degree, kind.microbatches, kind.rows * image_seconds
    if pp == 1:
        return m * (work * machine.alone / machine.speed + machine.overhead) + machine.norm
    alone = work * machine.alone
    filled = alone / machine.speed / (1 - (1 - 1 / m) ** pp) if kind.pipeline.virtual_stages == 1 else 0.0
    return max(m * alone / machine.speed / pp, m * alone / machine.lanes, filled) + machine.norm


def in_flight(pipeline: Plan, microbatches: int) -> tuple[int, ...]:
    """How many micro-batches each stage keeps between forward and backward at most, with one stage a rank.

    Under gpipe all of them; under 1f1b as many as have to come in before the first one is back.
    """
    stages = pipeline.num_stages
    if pipeline.schedule == "gpipe" and stages > 1:
        return (microbatches,) * stages
    return tuple(min(microbatches, stages - number) for number in range(stages))
