"""Lower bounds on the seconds and bytes of plans of one outline.

An outline is a pipeline with a batch size and a number of micro-batches; the strategies of the layers are open. The
search skips what cannot beat the best plan so far, so no bound may exceed what `vitpar.planner.cost.price` would
return.

- This module bounds each uniform plan (one strategy for all layers, even stages), by arrays over strategies.
- `vitpar.planner.search.relaxed` bounds all plans at once, with any mix of strategies and any split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitpar.planner.cost.price import Hops
from vitpar.planner.search.loads import Array
from vitpar.planner.search.options import Choices
from vitpar.planner.search.sections import Sections
from vitpar.strategy import Plan
from vitpar.strategy.stages import split_blocks, stages_of_rank

TIMES, EACH, BYTES = slice(0, 5), 5, slice(6, 8)
"""Rows of `layer_sums`: seconds of a step, seconds of a micro-batch, bytes."""
LIMITED = [0, 1, 2, 3, 4, 6, 7]
"""Rows of `layer_sums` with an upper limit: `TIMES` and `BYTES`."""


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

    alone: float = 1.0
    """Computing time relative to the profiled time, for a rank with a core to itself."""
    sending: float = 1.0
    """Waiting time for communication relative to the profiled time, at `speed` 1."""
    speed: float = 1.0
    """Share of a core that a rank gets while only its own stage computes, at most 1."""
    lanes: float = float("inf")
    """Number of places on the pp axis that can compute at full speed at a time."""
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


class Costs:
    """Costs of layers on a `Machine` in seconds: arrays [kinds, strategies].

    The attributes are the fields of `Loads`, scaled by the machine's rates. `work` is computing plus waiting per
    micro-batch, `optimizer` the seconds of the optimizer per step.
    """

    def __init__(self, choices: Choices, machine: Machine) -> None:
        a, slow = choices.loads, machine.sending / machine.speed
        self.computes = a.computes * (machine.alone / machine.speed)
        self.forward = a.forward * (machine.alone / machine.speed)
        self.late = a.late * (machine.alone / machine.speed)
        self.waits = a.waits * slow
        self.work = self.computes + self.waits
        self.optimizer = a.once
        self.edge = a.edge
        self.waits_once = a.waits_once * slow
        self.sent_each, self.sent_once = a.sent_each, a.sent_once
        self.sent_early, self.sent_late = a.sent_early, a.sent_late
        self.waits_across = a.waits_across * slow
        self.sent_each_across, self.sent_once_across = a.sent_each_across, a.sent_once_across
        self.sent_late_across = a.sent_late_across

    def unpipelined(self, m: int, overlap: tuple[float, float]) -> list[Array]:
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
        besides, computing = self.waits_once + self.optimizer, m * self.computes
        waits, sent = m * self.waits, m * self.sent_each + self.sent_once
        across = m * self.waits_across, m * self.sent_each_across + self.sent_once_across
        sums = []
        for blocked, background in ((waits - across[0], sent - across[1]), across):
            others = waits - blocked
            sums += [
                besides + blocked + background + (1 - k * compute) * computing,
                besides + self.edge + waits + computing + (1 - k * send) * (background - self.edge - others),
            ]
        late, last = self.sent_late, self.waits
        if across[0].any() or across[1].any():
            late, last = self.sent_late_across, self.waits_across
        before = (m - 1) * (self.computes + self.waits) + self.forward + last
        return [*sums, besides + self.edge + before + np.maximum(0.0, late - self.edge)]


@dataclass(frozen=True)
class LayerSums:
    """Costs of the layers of a stage, arrays with a column for each strategy. See `layer_sums` for the rows."""

    layers: Array
    """Costs of a layer by kind, [8, kinds, strategies]."""
    working: Array
    """Transient bytes in the backward of a layer, [kinds, strategies]."""
    after: Array
    """Bytes of a layer after its backward, while that of earlier layers runs, [kinds, strategies]."""


def layer_sums(outline: PlanOutline, choices: Choices, machine: Machine, number: int) -> LayerSums:
    """Return the costs of single layers of stage `number`.

    The stage costs at least their sum. Rows:

    - 0: seconds from the stage's first micro-batch to its last, plus the optimizer. To this the time of the earlier
      stages can be added: the first micro-batch passes through them before, the last one after.
    - 1: row 0 plus what the rank waits for after its last micro-batch
    - 2: row 1 for gradients whose reduction in the background only starts in the last backward
    - 3: row 1 with a first forward that waits for gathered parameters
    - 4: seconds of communication in the background, plus the optimizer
    - 5: seconds of one micro-batch, forward and backward
    - 6: bytes when the last backward ends, or while the optimizer steps
    - 7: bytes when the backward of the stage's last layers begins, with as many micro-batches alive as the stage keeps

    Without a pipeline, rows 0 to 4 are the bounds of `Costs.unpipelined`, the first two repeated.
    """
    pipeline, m, a = outline.pipeline, outline.microbatches, choices.loads
    costs, pp = Costs(choices, machine), pipeline.pipeline_degree
    if pp == 1:
        times = costs.unpipelined(m, machine.overlap)
    else:
        computing, sent = m * costs.work + costs.optimizer, m * costs.sent_each + costs.sent_once
        late = (m - 1) * costs.work + costs.forward + costs.sent_late + costs.waits_once + costs.optimizer
        once = computing + costs.waits_once
        times = [computing, once, late, once - costs.forward + costs.sent_early, sent + costs.optimizer]
    alive = in_flight(pipeline, m)[number]
    # With more micro-batches than are alive, the gradients of earlier ones exist at the peak of row 7.
    waiting = m > (1 if pp == 1 else alive)
    busy = a.kept + a.gathered + a.gradients * waiting + alive * a.saved
    working = a.working_once if m == 1 else a.working + a.fresh * (not waiting)
    if alive == 1:
        working = np.maximum(working, a.working_once - a.fresh * waiting)
    working = np.maximum(working, a.copied + a.fresh * (not waiting) - alive * a.saved)
    after = a.kept + a.gathered + (a.reduced if m == pp == 1 else a.gradients) + (alive - 1) * a.saved
    rows = np.stack([*times, costs.work, a.kept + a.reduced, busy])
    return LayerSums(rows, working, after)


def uniform_bounds(outline: PlanOutline, choices: Choices, sections: Sections, machine: Machine) -> tuple[Array, Array]:
    """Return lower bounds on (seconds of a step, bytes of the fullest rank) of the uniform plan of each strategy."""
    pipeline, m = outline.pipeline, outline.microbatches
    stages = split_blocks(sections.depth, pipeline.num_stages, "even")
    counts = sections.stage_counts([len(blocks) for blocks in stages])
    costs = Costs(choices, machine)
    if pipeline.pipeline_degree == 1:
        sums = [(counts @ layers)[0] for layers in costs.unpipelined(m, machine.overlap)]
        seconds = m * machine.overhead + np.max(sums, axis=0)
    elif pipeline.virtual_stages == 1:
        seconds = _one_stage_a_rank(costs, choices, counts, outline, machine)
    else:
        seconds = _several_stages_a_rank(costs, choices, counts, outline, machine)
    ends = [sections.rows[blocks[-1]] for blocks in stages]
    return seconds + machine.norm, _uniform_bytes(outline, choices, counts, ends, machine)


def _one_stage_a_rank(costs: Costs, choices: Choices, counts: Array, outline: PlanOutline, machine: Machine) -> Array:
    """Return the least seconds of a step under 1f1b and gpipe, by strategy.

    Stage j works on m micro-batches after the first one passed the stages before it, and the last one has to go back
    through them. Each micro-batch stays between its forward and backward at stage j until it is back from the later
    stages. At most `in_flight` of them stay at a time, so m stays take at least m / in_flight times one stay.
    """
    m, (hops, busiest) = outline.microbatches, choices.by_share(machine.hops)
    work = counts @ costs.work + 2 * machine.action
    forward = counts @ costs.forward + machine.action
    # The first forward of a stage gathers its parameters; the later ones find them gathered.
    first = np.maximum(forward, counts @ costs.sent_early)
    sent = np.concatenate([np.zeros((1, hops.shape[1])), np.cumsum(hops, 0)])
    there = np.cumsum(first, 0) - first + sent
    slower = first - forward
    back = np.cumsum(work - forward, 0) - (work - forward) + sent
    optimizer, once = counts @ costs.optimizer, counts @ costs.waits_once
    behind = np.cumsum(work[::-1], 0)[::-1] + 2 * (sent[-1] - sent)
    alive = np.array(in_flight(outline.pipeline, m), float)[:, None]
    # Waiting after the last backward (`once`, `sent_late`) is not added to `back`: the earlier stages continue with the
    # last micro-batch meanwhile.
    lower_bounds = [
        there + back + slower + m * work + optimizer,
        there + slower + m * work + once + optimizer,
        there + slower + (m - 1) * work + forward + counts @ costs.sent_late + optimizer,
        there + back + m / alive * behind + optimizer,
        counts @ (m * costs.sent_each + costs.sent_once) + optimizer,
        np.broadcast_to(m * work.sum(0) * machine.speed / machine.lanes, work.shape),
        np.broadcast_to(m * busiest, work.shape),
    ]
    passing = work.sum(0) + 2 * sent[-1] + queueing(outline, hops, work).max(0)
    return np.asarray(np.maximum(passing, np.max(lower_bounds, axis=(0, 1))))


def queueing(outline: PlanOutline, hops: Array, work: Array) -> Array:
    """Return the seconds that messages between two stages add to the passing of one micro-batch, by hop.

    hops: seconds of a message between two neighbouring stages, [pipeline degree - 1, ...]
    work: least seconds of a micro-batch in each stage, [pipeline degree, ...]

    Messages are sent one after the other: all m before the last micro-batch passes on; under gpipe again in backward.
    Under 1f1b a stage starts a forward only after the backward that its neighbour sent, for which the neighbour starts
    the next but one backward: every two micro-batches take a message each way and the work of both stages.
    """
    m, number = outline.microbatches, np.arange(len(hops)).reshape(-1, *(1,) * (hops.ndim - 1))
    queue = (m - 1) * hops * (2 if outline.pipeline.schedule == "gpipe" else 1)
    if outline.pipeline.schedule != "1f1b":
        return queue
    cycles: Array = rounds(outline)[number] * (2 * hops + work[:-1] + work[1:])
    return np.maximum(queue, cycles)


def rounds(outline: PlanOutline) -> NDArray[np.int64]:
    """Return how many times 1f1b waits for messages both ways between each stage and the next (`queueing`)."""
    pp = outline.pipeline.pipeline_degree
    return np.maximum(0, (outline.microbatches - 1 - pp + np.arange(pp - 1)) // 2 + 1)


def _several_stages_a_rank(
    costs: Costs, choices: Choices, counts: Array, outline: PlanOutline, machine: Machine
) -> Array:
    """Return the least seconds of a step with several stages per rank, by strategy.

    A rank works on m micro-batches in each of its stages. The last rank begins after the first pp - 1 stages.
    """
    pipeline, m, (hops, busiest) = outline.pipeline, outline.microbatches, choices.by_share(machine.hops)
    pp, late = pipeline.pipeline_degree, counts @ costs.late * pipeline.splits_backward
    places = np.zeros((pp, len(counts)))
    for place in range(pp):
        places[place, list(stages_of_rank(place, pipeline))] = 1
    work = counts @ costs.work + 2 * machine.action
    forward = counts @ costs.forward + machine.action
    # The last micro-batch also has to go back through these stages. With split backward the last rank can compute
    # gradients of weights meanwhile, so that only the forward there counts.
    before = forward[: pp - 1].sum(0) if pipeline.splits_backward else work[: pp - 1].sum(0)
    optimizer = places @ counts @ costs.optimizer
    lower_bounds = [
        m * places @ work + places @ counts @ costs.waits_once + optimizer,
        np.broadcast_to(before + (m * places @ work + optimizer)[-1], optimizer.shape),
        places @ counts @ (m * costs.sent_each + costs.sent_once) + optimizer,
        np.broadcast_to(m * work.sum(0) * machine.speed / machine.lanes, optimizer.shape),
        np.broadcast_to(m * busiest, optimizer.shape),
        np.broadcast_to((work - late).sum(0) + 2 * hops.sum(0) + (m - 1) * hops.max(0), optimizer.shape),
    ]
    return np.asarray(np.max(lower_bounds, axis=(0, 1)))


def _uniform_bytes(outline: PlanOutline, choices: Choices, counts: Array, ends: list[int], machine: Machine) -> Array:
    """Return the least bytes of the fullest rank, by strategy: the larger of two moments of the step.

    The moments are the step of the optimizer, and the backward of the last block with all micro-batches alive.
    counts: layers of each stage by kind, [stages, kinds]
    ends: row of the kind of each stage's last block
    """
    pipeline, m, a = outline.pipeline, outline.microbatches, choices.loads
    last = len(counts) - 1
    number = np.arange(len(counts))[:, None]
    travelling = m * machine.tokens * choices.token_share * ((number > 0) * 1.0 + (number < last))
    held = counts @ a.kept + travelling + (number == 0) * machine.images * choices.image_share
    saved, gathered, gradients = counts @ a.saved, counts @ a.gathered, counts @ a.gradients
    resting = held + counts @ a.reduced
    if pipeline.virtual_stages > 1:
        places = [list(stages_of_rank(place, pipeline)) for place in range(pipeline.pipeline_degree)]
        # Schedules differ in what they keep; under each, some micro-batch is alive in all stages of the rank at once.
        busy = [held[p].sum(0) + gathered[p].sum(0) + saved[p].sum(0) for p in places]
        return np.asarray(np.max([*busy, *(resting[p].sum(0) for p in places)], axis=0))
    alive = np.array(in_flight(pipeline, m))[:, None]
    # With more micro-batches than are alive, gradients of earlier ones exist when the peak is reached.
    again = m > (1 if pipeline.pipeline_degree == 1 else alive)
    blocks = alive * saved - counts[:, -1:] * a.saved[-1]
    several = a.working[ends] + np.where(again, gradients, a.fresh[ends])
    working = a.working_once[ends] if m == 1 else several
    busy_bytes = held + gathered + blocks + working
    return np.asarray(np.maximum(resting, busy_bytes).max(0))


def ideal_seconds(outline: PlanOutline, work: float, share: float, machine: Machine) -> float:
    """Return the least seconds of a step without communication and memory limits: the cheapest bound of an outline.

    work: least profiled seconds to compute one micro-batch in all blocks
    share: least share of that work that one of even stages has
    """
    pp, m = outline.pipeline.pipeline_degree, outline.microbatches
    if pp == 1:
        return m * (work * machine.alone / machine.speed + machine.overhead) + machine.norm
    alone = work * machine.alone / machine.speed
    if outline.pipeline.virtual_stages == 1:
        # Stage j takes w_j per micro-batch, and the step at least w_0 + … + w_(j-1) + m·w_j for every j. The split that
        # minimizes the largest has all equal, with w_(j+1) = (1 - 1/m)·w_j: later stages get less work.
        filled = alone / (1 - (1 - 1 / m) ** pp)
    else:
        before = 0.0 if outline.pipeline.splits_backward else pp - 1.0
        filled = share * (before + m * outline.pipeline.virtual_stages) * alone
    return max(m * alone / pp, m * alone * machine.speed / machine.lanes, filled) + machine.norm


def in_flight(pipeline: Plan, microbatches: int) -> tuple[int, ...]:
    """Return how many micro-batches each stage holds between forward and backward at most, with one stage per rank.

    gpipe runs all forwards first. Under 1f1b stage j runs min(m, stages - j) forwards before its first backward.
    """
    stages = pipeline.num_stages
    if pipeline.schedule == "gpipe" and stages > 1:
        return (microbatches,) * stages
    return tuple(min(microbatches, stages - number) for number in range(stages))
