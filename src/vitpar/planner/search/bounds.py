"""Lower bounds on the seconds and bytes of plans of one outline, from the least costs of layers (`loads`).

An outline is a pipeline with a batch size and a number of micro-batches; the strategies of the layers are open. The
search skips what cannot beat the best plan so far, so no bound may exceed what `vitpar.planner.cost.price` would
return.

- `layer_sums` are the costs of single layers of a stage, from which the dynamic programme builds stages, too.
- `totals` bound a step by sums over all layers, whatever the split into stages. For any mix of strategies,
  `vitpar.planner.search.relaxed` minimizes them.
- `uniform_bounds` bound each uniform plan (one strategy for all layers, even stages): by its stages and by `totals`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitpar.planner.cost.price import Hops
from vitpar.planner.search.loads import Array, Loads
from vitpar.planner.search.options import Choices
from vitpar.planner.search.sections import Sections
from vitpar.strategy import Plan
from vitpar.strategy.stages import split_blocks, stages_of_rank

TIMES, EACH, BYTES, ROWS = slice(0, 5), 5, slice(6, 9), 9
"""Rows of `layer_sums`: seconds of a step, seconds of a micro-batch, bytes; their number."""


@dataclass(frozen=True)
class PlanOutline:
    """A set of plans that differ only in the strategies of layers and the split into stages."""

    pipeline: Plan
    """Pipeline degree, schedule and virtual stages; a plan without layers."""
    batch_size: int
    """Global images per step."""
    microbatches: int
    """Number of micro-batches per step."""

    @property
    def rows(self) -> int:
        """Images per micro-batch."""
        return self.batch_size // self.microbatches


@dataclass(frozen=True)
class Machine:
    """Best-case rates and memory of a rank in plans of one outline."""

    overhead: float = 0.0
    """Seconds per micro-batch outside its layers, without a pipeline."""
    action: float = 0.0
    """Seconds per pipeline action outside its layers."""
    norm: float = 0.0
    """Seconds per step to all-reduce the gradient norm, and of the teacher's forward."""
    overlap: tuple[float, float] = (1.0, 1.0)
    """Slow-down factors of (computing, communication) while both run, at least 1."""
    hops: Callable[[float], Hops] = lambda share: Hops()
    """Function of a share of a micro-batch's tokens, 0 to 1: seconds to send it from stage to stage."""
    budget: float = float("inf")
    """Bytes of a rank that the model may use."""
    images: float = 0.0
    """Bytes of the images of a global batch."""
    tokens: float = 0.0
    """Bytes of the smallest activation between blocks of all tokens of a micro-batch."""


@dataclass(frozen=True)
class LayerSums:
    """Costs of the layers of a stage, arrays with a column for each strategy. See `layer_sums` for the rows."""

    layers: Array
    """Costs of a layer by kind, [ROWS, kinds, strategies]."""
    working: Array
    """Transient bytes in the backward of a layer on top of the last two rows, [2, kinds, strategies]."""
    after: Array
    """Bytes of a layer after its backward, while that of earlier layers runs, [kinds, strategies]."""


def layer_sums(outline: PlanOutline, loads: Loads, machine: Machine, number: int) -> LayerSums:
    """Return the costs of single layers of stage `number`.

    The stage costs at least their sum. Rows:

    - 0: seconds from the stage's first micro-batch to its last, plus the optimizer. To this the time of the earlier
      stages can be added: the first micro-batch passes through them before, the last one after.
    - 1: row 0 plus what the rank waits for after its last micro-batch
    - 2: row 0 for gradients whose reduction in the background only starts in the last backward
    - 3: row 1 with a first forward that waits for gathered parameters
    - 4: seconds of communication in the background, plus the optimizer
    - 5: seconds of one micro-batch, forward and backward
    - 6: bytes when the last backward ends, or while the optimizer steps
    - 7: bytes when the first backward of the stage's last layers begins with as many micro-batches alive as it keeps
    - 8: bytes when their last backward begins: one micro-batch is alive, gradients of the others exist

    Without a pipeline, rows 0 to 4 are the bounds of `_unpipelined`.
    """
    pipeline, m, a = outline.pipeline, outline.microbatches, loads
    pp, one = pipeline.pipeline_degree, pipeline.virtual_stages == 1
    if pp == 1:
        times = _unpipelined(a, m, machine.overlap)
    else:
        computing, once = m * a.work + a.once, m * a.work + a.once + a.waits_once
        late = (m - 1) * a.work + a.forward + a.sent_late * one + a.once
        early = once - a.forward + a.sent_early * one
        times = [computing, once, late, early, m * a.sent_each + a.sent_once + a.once]
    alive = in_flight(pipeline, m)[number]
    # With more micro-batches than are alive, the gradients of earlier ones exist at the peak of row 7.
    kept, waiting = a.kept + a.gathered, one and m > alive
    first, last = kept + a.gradients * waiting + alive * a.saved, kept + a.gradients * (one and m > 1) + a.saved
    working, in_last = working_bytes(a, m, alive)
    working = np.stack([working, np.maximum(in_last, a.copied + a.fresh * (m == 1) - a.saved)])
    after = kept + (a.reduced if m == pp == 1 else a.gradients) + (alive - 1) * a.saved
    return LayerSums(np.stack([*times, a.work, a.kept + a.reduced, first, last]), working, after)


def working_bytes(loads: Loads, m: int, alive: int) -> tuple[Array, Array]:
    """Return the transient bytes of a layer's backward, while `alive` of `m` micro-batches are alive and in the last.

    They come on top of the last two rows of `layer_sums`.
    """
    first = loads.working_once if m == 1 else loads.working + loads.fresh * (m <= alive)
    return first, loads.working_once - loads.fresh * (m > 1)


def _unpipelined(a: Loads, m: int, overlap: tuple[float, float]) -> list[Array]:
    """Return five lower bounds on a step of `m` micro-batches without a pipeline, as seconds per layer to sum up.

    Let C be the seconds of computing, B those of blocking communication, of which B_w use one of the two wires, and
    S_w those of communication in the background over it, each without the other. During x seconds of overlap,
    x / slow_c of C and x / slow_s of S_w are done. The background also progresses while the other wire blocks, for
    B - B_w seconds, and while the rank idles. So the step takes at least C + B_w + S_w - k·x with
    k = 1 / slow_c + 1 / slow_s - 1, where x is at most slow_c·C: the first bound of a wire. And x is at least
    slow_s·(S_w - (B - B_w) - idle), where C and B take (1 - 1 / slow_c)·x longer: the second one. The last bound:
    gradients are only reduced from the last backward on, after all computing before it.

    overlap: (slow_c, slow_s), as `Machine.overlap`
    """
    compute, send = overlap
    k = max(0.0, 1 / compute + 1 / send - 1)
    besides, computing = a.waits_once + a.once, m * a.computes
    waits, sent = m * a.waits, m * a.sent_each + a.sent_once
    across = m * a.waits_across, m * a.sent_each_across + a.sent_once_across
    sums = []
    for blocked, background in ((waits - across[0], sent - across[1]), across):
        others = waits - blocked
        sums += [
            besides + blocked + background + (1 - k * compute) * computing,
            besides + a.edge + waits + computing + (1 - k * send) * (background - a.edge - others),
        ]
    late, last = a.sent_late, a.waits
    if across[0].any() or across[1].any():
        late, last = a.sent_late_across, a.waits_across
    before = (m - 1) * a.work + a.forward + last
    return [*sums, besides + a.edge + before + np.maximum(0.0, late - a.edge)]


def _actions_counted(m: int) -> Array:
    """Return of how many micro-batches each row of `TIMES` counts the actions of a stage in a pipeline."""
    return np.array([m, m, m - 1, m - 1, 0.0])[:, None]


def totals(
    outline: PlanOutline, choices: Choices, machine: Machine, stages: Array | None = None
) -> tuple[Array, Array]:
    """Return lower bounds on the seconds of a step, as sums over embed, blocks, head plus a constant.

    The sums are an array [bounds, kinds, strategies], the constants [bounds, strategies or 1]. In a pipeline:

    - One of the pp ranks has at least the mean of the rows of `layer_sums`.
    - A micro-batch passes through all layers, forward and backward, one after the other.
    - The busiest wire sends the messages of all micro-batches.
    - One stage per rank: stage j starts after the earlier stages, which finish after it. A weighted mean of the stages'
      bounds that counts the work of every stage equally depends on the sum over layers only, not on the split.
    - One stage per rank: at most as many micro-batches as the first stage keeps are between their first forward and
      last backward at a time.

    stages: layers of each stage by kind, [stages, kinds], of uniform plans; None for any mix and any split
    """
    pipeline, m, loads = outline.pipeline, outline.microbatches, choices.loads
    pp, actions = pipeline.pipeline_degree, 2 * machine.action * pipeline.num_stages
    means = layer_sums(outline, loads, machine, 0).layers[TIMES] / pp
    if pp == 1:
        return means, np.full((len(means), 1), m * machine.overhead + machine.norm)
    shares, least = choices.token_share, loads.work[1:-1]
    if stages is None:  # stages of one block each; the smallest messages may belong to other strategies
        shares, least = shares.min(keepdims=True), least.min(keepdims=True)
    else:
        least = stages @ loads.work
    hops, busiest = seconds_by_share(shares, machine.hops)
    sent, nothing = 2 * hops.sum(0), np.zeros_like(busiest)
    queue = queueing(outline, hops, least.min(0) + 2 * machine.action).max(0)
    passing = loads.work - loads.late * pipeline.splits_backward + loads.once / pp
    early = (loads.sent_early - loads.forward) * (pipeline.virtual_stages == 1)
    each_action = actions / pp * _actions_counted(m)
    bounds = [
        *zip(means[1:], each_action[1:] + nothing, strict=True),
        (passing, actions + sent + queue),
        (passing + early, nothing),
        (0.0 * passing, m * busiest),
    ]
    if pipeline.virtual_stages == 1:
        # Stage j gives: step >= w_0 + … + w_(j-1) + m·w_j. These weights sum to 1, and in the weighted mean each w_i
        # has the same factor `every`.
        every = 1 / (1 - (1 - 1 / m) ** pp)
        weights = every / m * (1 - 1 / m) ** (pp - 1 - np.arange(1, pp))
        bounds.append((every * loads.work, every * actions + 2 * weights @ np.cumsum(hops, 0)))
        if pipeline.schedule == "1f1b":
            # The cycle of two stages (`queueing`) with the work of all other stages, each counted equally.
            every = 2 * int(rounds(outline)[0]) / pp
            bounds.append((every * loads.work, every * (actions + 2 * hops.max(0))))
        each = m / in_flight(pipeline, m)[0]
        bounds.append((each * loads.work + loads.once / pp, each * (actions + sent)))
    sums, constants = zip(*bounds, strict=True)
    return np.stack(sums), np.stack(constants) + machine.norm


def uniform_bounds(outline: PlanOutline, choices: Choices, sections: Sections, machine: Machine) -> tuple[Array, Array]:
    """Return lower bounds on (seconds of a step, bytes of the fullest rank) of the uniform plan of each strategy."""
    pipeline, m, loads = outline.pipeline, outline.microbatches, choices.loads
    pp, split = pipeline.pipeline_degree, split_blocks(sections.depth, pipeline.num_stages, "even")
    stages = sections.stage_counts([len(blocks) for blocks in split])
    totalled, constants = totals(outline, choices, machine, stages)
    seconds = (np.tensordot(sections.counts, totalled, (0, 1)) + constants).max(0)
    places = [list(stages_of_rank(place, pipeline)) for place in range(pp)]
    if pp > 1:
        ranks = np.array([stages[numbers].sum(0) for numbers in places])
        times = np.tensordot(ranks, layer_sums(outline, loads, machine, 0).layers[TIMES], (1, 1))
        times += machine.norm + 2 * machine.action * len(places[0]) * _actions_counted(m)
        # A rank starts after the stages in front of its first one. The last micro-batch has to go back through these;
        # with split backward the rank computes gradients of weights meanwhile.
        hops = seconds_by_share(choices.token_share, machine.hops)[0][: pp - 1]
        there = np.cumsum(stages[: pp - 1] @ loads.forward + machine.action + hops, 0)
        back = np.cumsum(stages[: pp - 1] @ (loads.work - loads.forward) + machine.action + hops, 0)
        times[1:, :4] += there[:, None]
        times[1:, 0] += back * (not pipeline.splits_backward)
        seconds = np.maximum(seconds, times.max((0, 1)))
    # Of ranks with equally many blocks, the first one keeps most micro-batches; the last one has the head.
    ends, needs = [sections.rows[blocks[-1]] for blocks in split], list[Array]()
    for numbers in [places[place] for place in {0, pp - 1}]:
        first, alive = numbers[0], in_flight(pipeline, m)[numbers[0]]
        sums = layer_sums(outline, loads, machine, first)
        travelling = sum((number > 0) + (number < len(stages) - 1) for number in numbers) * m * machine.tokens
        held = travelling * choices.token_share + (first == 0) * machine.images * choices.image_share
        # Moments: the step of the optimizer, and the first and the last backward of the last block.
        moments = stages[numbers].sum(0) @ sums.layers[BYTES]
        if len(numbers) == 1:
            moments[1:] += [working[ends[first]] for working in working_bytes(loads, m, alive)]
            if first == len(stages) - 1:  # the head is done by then
                held_by_head = np.stack([loads.settled[-1] + (alive - 1) * loads.saved[-1], loads.settled[-1]])
                moments[1:] += held_by_head - sums.layers[-2:, -1]
        needs.append(held + moments.max(0))
    return seconds, np.max(needs, axis=0)


def seconds_by_share(shares: Array, hops: Callable[[float], Hops]) -> tuple[Array, Array]:
    """Return the fields of `hops` of each column's share of tokens, as arrays by column."""
    # There are few different shares, and `hops` is slow compared with an array operation.
    distinct, inverse = np.unique(shares, return_inverse=True)
    every = [hops(float(share)) for share in distinct]
    return np.array([one.each for one in every])[inverse].T, np.array([one.busiest for one in every])[inverse]


def queueing(outline: PlanOutline, hops: Array, work: Array) -> Array:
    """Return the seconds that messages between two stages add to the passing of one micro-batch, by hop.

    hops: seconds of a message between two neighbouring stages, [pipeline degree - 1, ...]
    work: least seconds of a micro-batch in a stage, [...]

    Messages are sent one after the other: all m before the last micro-batch passes on; under gpipe again in backward.
    Under 1f1b a stage starts a forward only after the backward that its neighbour sent, for which the neighbour starts
    the next but one backward: every two micro-batches take a message each way and the work of both stages.
    """
    queue = (outline.microbatches - 1) * hops * (2 if outline.pipeline.schedule == "gpipe" else 1)
    if outline.pipeline.schedule != "1f1b":
        return queue
    return np.maximum(queue, 2 * rounds(outline)[:, None] * (hops + work))


def rounds(outline: PlanOutline) -> NDArray[np.int64]:
    """Return how many times 1f1b waits for messages both ways between each stage and the next (`queueing`)."""
    pp = outline.pipeline.pipeline_degree
    return np.maximum(0, (outline.microbatches - 1 - pp + np.arange(pp - 1)) // 2 + 1)


def ideal_seconds(outline: PlanOutline, work: float, share: float, machine: Machine) -> float:
    """Return the least seconds of a step without communication and memory limits: the cheapest bound of an outline.

    work: least profiled seconds to compute one micro-batch in all blocks
    share: least share of that work that one of even stages has
    """
    pp, m = outline.pipeline.pipeline_degree, outline.microbatches
    if pp == 1:
        return m * (work + machine.overhead) + machine.norm
    if outline.pipeline.virtual_stages == 1:
        # Stage j takes w_j per micro-batch, and the step at least w_0 + … + w_(j-1) + m·w_j for every j. The split that
        # minimizes the largest has all equal, with w_(j+1) = (1 - 1/m)·w_j: later stages get less work.
        filled = work / (1 - (1 - 1 / m) ** pp)
    else:
        before = 0.0 if outline.pipeline.splits_backward else pp - 1.0
        filled = share * (before + m * outline.pipeline.virtual_stages) * work
    return filled + machine.norm


def in_flight(pipeline: Plan, microbatches: int) -> tuple[int, ...]:
    """Return how many micro-batches each stage holds between forward and backward at its peak, at least.

    gpipe runs all forwards first. Under 1f1b stage j runs min(m, stages - j) forwards before its first backward.
    Schedules with several stages per rank differ: under each, one is in all stages of a rank at once.
    """
    stages = pipeline.num_stages
    if pipeline.schedule == "gpipe" and stages > 1:
        return (microbatches,) * stages
    if pipeline.virtual_stages > 1:
        return (1,) * stages
    return tuple(min(microbatches, stages - number) for number in range(stages))
