"""Lower bounds on the seconds and bytes of plans of one kind: a pipeline with its micro-batches, whatever the
strategies of its layers are.

A search skips what cannot beat the best plan so far, so every bound here has to hold for the price that
``vitpar.planner.cost.price`` would give. Two sets of plans are bounded:

- here: each plan with one strategy for all layers and even stages, by arrays over strategies;
- in `vitpar.planner.search.relaxed`: all plans, with any mix of strategies and any split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitpar.planner.search.options import Choices
from vitpar.strategy import Plan
from vitpar.strategy.stages import split_blocks, stages_of_rank

Array = NDArray[np.float64]
TIMES, EACH, BYTES = slice(0, 5), 5, slice(6, 8)
LIMITED = [0, 1, 2, 3, 4, 6, 7]
"""Rows of `stage_sums`: seconds of a step, seconds of a micro-batch, bytes; and those that a limit is set to."""
BLOCK = 1
"""Row of blocks in arrays by kind of layer; embed and head are around it."""


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


class Costs:
    """Arrays of a kind's strategies, by row of layers (embed, block, head): seconds of a micro-batch and of a step."""

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

    The sums are, in seconds: a step from the stage's first micro-batch until its last one is back at the first stage,
    and the optimizer; a step from the first micro-batch on, with what the rank waits for after the last one; the same
    with gradients that are sent from the last backward on; the same with parameters that the first forward waits for;
    what is sent in the background; one micro-batch. In bytes: when the optimizer steps; when the last backward begins.
    Without a pipeline the first are those of `Costs.unpipelined`.
    """
    pipeline, m, a = kind.pipeline, kind.microbatches, choices.loads
    costs, pp = Costs(choices, machine), pipeline.pipeline_degree
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
    embed, block, head = layers[:, 0] * (number == 0), layers[:, BLOCK], layers[:, 2] * (number == last)
    hops = (number > 0) + (number < last)
    bytes_besides = hops * m * machine.tokens * choices.token_share.min() + (number == 0) * machine.images * float(
        choices.image_share.min()
    )
    embed[BYTES] += bytes_besides
    # When the last block's backward begins, the head's is done.
    working = a["working_once"][BLOCK] if m == 1 else a["working"][BLOCK] + a["fresh"][BLOCK] * (not waiting)
    head[-1] += np.maximum(0.0, working - a["saved"][2] * (number == last))
    return block, embed, head


def uniform_bounds(kind: Kind, choices: Choices, depth: int, machine: Machine) -> tuple[Array, Array]:
    """Return (seconds of a step, bytes of the fullest rank) that plans with one strategy take at least, by strategy."""
    pipeline, m = kind.pipeline, kind.microbatches
    sizes = [len(blocks) for blocks in split_blocks(depth, pipeline.num_stages, "even")]
    counts = np.array([[number == 0, size, number == len(sizes) - 1] for number, size in enumerate(sizes)], float)
    costs = Costs(choices, machine)
    if pipeline.pipeline_degree == 1:
        sums = [(counts @ layers)[0] for layers in costs.unpipelined(m, machine.overlap)]
        seconds = m * machine.overhead + np.max(sums, axis=0)
    elif pipeline.virtual_stages == 1:
        seconds = _one_stage_a_rank(costs, choices, counts, kind, machine)
    else:
        seconds = _several_stages_a_rank(costs, choices, counts, kind, machine)
    return seconds + machine.norm, _uniform_bytes(kind, choices, counts, machine)


def _one_stage_a_rank(costs: Costs, choices: Choices, counts: Array, kind: Kind, machine: Machine) -> Array:
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


def _several_stages_a_rank(costs: Costs, choices: Choices, counts: Array, kind: Kind, machine: Machine) -> Array:
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


def ideal_seconds(kind: Kind, work: float, depth: int, machine: Machine) -> float:
    """Return the seconds of a step, were nothing sent and no memory needed.

    work: seconds that all blocks compute for a micro-batch, at least.
    """
    pp, m = kind.pipeline.pipeline_degree, kind.microbatches
    if pp == 1:
        return m * (work * machine.alone / machine.speed + machine.overhead) + machine.norm
    alone = work * machine.alone / machine.speed
    if kind.pipeline.virtual_stages == 1:
        filled = alone / (1 - (1 - 1 / m) ** pp)
    else:
        stages, before = kind.pipeline.num_stages, 0.0 if kind.pipeline.splits_backward else pp - 1.0
        filled = depth // stages / depth * (before + m * kind.pipeline.virtual_stages) * alone
    return max(m * alone / pp, m * alone * machine.speed / machine.lanes, filled) + machine.norm


def in_flight(pipeline: Plan, microbatches: int) -> tuple[int, ...]:
    """How many micro-batches each stage keeps between forward and backward at most, with one stage a rank.

    Under gpipe all of them; under 1f1b as many as have to come in before the first one is back.
    """
    stages = pipeline.num_stages
    if pipeline.schedule == "gpipe" and stages > 1:
        return (microbatches,) * stages
    return tuple(min(microbatches, stages - number) for number in range(stages))
