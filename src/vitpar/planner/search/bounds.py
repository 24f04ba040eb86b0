"""What no plan of a kind can beat: a kind is a pipeline with its micro-batches, whatever its layers' strategies are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from vitpar.planner.cost.price import actions
from vitpar.planner.cost.stage import Load
from vitpar.planner.search.options import KINDS, Option
from vitpar.strategy import SCHEDULES, Plan

ROUNDS = 10  # of narrowing a price down


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
    """What a rank has.

    alone, sending: how many times longer than profiled it computes with a core for itself, and waits for what is sent.
    speed: at which it goes on at best, as ranks share cores. lanes: how many places of the pp axis go on at that, in
    all. overhead: seconds of a micro-batch besides its layers. budget: bytes of memory.
    """

    alone: float
    sending: float
    speed: float
    lanes: float
    overhead: float
    budget: float

    def work(self, load: Load) -> float:
        """Seconds of a layer for a micro-batch at full speed."""
        return load.computes * self.alone + load.waits * self.sending

    def once(self, load: Load) -> float:
        """Seconds of a layer once a step."""
        return load.once + load.edge + load.waits_once * self.sending / self.speed


Cost = Callable[[Load], float]


def _times(kind: Kind, depth: int, machine: Machine) -> list[tuple[Cost, Cost]]:
    """Ways to bound the seconds of a step from below, each a sum over blocks and one over stem and head.

    - All layers work on m micro-batches, with as many cores as there are.
    - Of pp ranks one has at least its share of that, and of what is done once.
    - A micro-batch goes through all layers and back, one after the other.
    - Where a rank has one stage and computes backward at once, stage j starts after the stages before it and they end
      after it: T >= w_0 + … + w_j-1 + m w_j for every j. The least T has equality everywhere, so that
      w_j = (1 - 1 / m) w_j-1, and T = (w_0 + … + w_pp-1) / (1 - (1 - 1 / m) ** pp).
    - Where it has several, even ones with one strategy, the last rank starts after pp - 1 stages, and if backward is
      computed at once they end after it.
    - What is sent in the background takes its time.
    """
    pipeline, m = kind.pipeline, kind.microbatches
    pp, schedule = pipeline.pipeline_degree, SCHEDULES[pipeline.schedule]

    def work(load: Load) -> float:
        return machine.work(load) / machine.speed

    def share(load: Load) -> float:
        return (m * work(load) + machine.once(load)) / pp

    def cores(load: Load) -> float:
        return m * machine.work(load) / machine.lanes

    def chain(load: Load) -> float:
        return work(load) - load.late * machine.alone / machine.speed

    def sent(load: Load) -> float:
        return (m * load.sent_each + load.sent_once) / pp

    found: list[tuple[Cost, Cost]] = [(share, share), (sent, sent)]
    if pp == 1:
        return found
    found += [(chain, chain), (cores, cores)]
    if schedule.stages == "one":
        filled = 1 / (1 - (1 - 1 / m) ** pp)
        found.append((lambda load: filled * work(load),) * 2)
    else:
        least = depth // pipeline.num_stages / depth

        def last(load: Load) -> float:
            before = load.forward * machine.alone / machine.speed if schedule.splits_backward else work(load)
            return least * ((pp - 1) * before + m * pipeline.virtual_stages * work(load))

        found.append((last, lambda load: 0.0))
    return found


def least_seconds(kind: Kind, options: Sequence[Option], depth: int, machine: Machine, *, quick: bool = False) -> float:
    """Seconds of a step that no plan of the kind is faster than, whatever mix of `options` its layers have; infinite
    where none fits into memory.

    Memory is relaxed: bytes above the budget cost a price, at the price that gives the highest bound (Lagrange).
    quick: without memory, but where nothing fits.
    """
    if not options:
        return float("inf")
    pp, m = kind.pipeline.pipeline_degree, kind.microbatches
    rows = list(zip(*(tuple(option.loads[layer] for layer in KINDS) for option in options), strict=True))
    alive = m if kind.pipeline.schedule == "gpipe" else 1  # of the stage that keeps least
    budget = machine.budget * pp

    def least(block: Cost, end: Cost) -> float:
        return min(map(end, rows[0])) + depth * min(map(block, rows[1])) + min(map(end, rows[2]))

    def resting(load: Load) -> float:
        return load.kept + load.reduced

    def busy(load: Load) -> float:
        gradients = load.gradients if pp == 1 and m > 1 else 0.0
        return load.kept + load.gathered + gradients + alive * load.saved

    needs = (resting, busy)
    if any(least(need, need) > budget for need in needs):
        return float("inf")
    times = _times(kind, depth, machine)
    bound = max(least(*time) for time in times)
    if not quick and machine.budget < float("inf"):
        for need in needs:
            bound = max(bound, *(_relaxed(least, time, need, budget) for time in times))
    return bound + m * machine.overhead


def ideal_seconds(kind: Kind, image_seconds: float, depth: int, machine: Machine) -> float:
    """Seconds of a step, were nothing sent and no memory needed. image_seconds: that an image costs a rank in all
    blocks, at least."""
    computes = kind.rows * image_seconds / depth
    block = Load(computes=computes, late=computes)
    return depth * max(cost(block) for cost, _ in _times(kind, depth, machine)) + kind.microbatches * machine.overhead


def _relaxed(least: Callable[[Cost, Cost], float], time: tuple[Cost, Cost], need: Cost, budget: float) -> float:
    """The highest bound over prices of memory; concave in the price, so it is narrowed down from both sides."""
    block, end = time

    def at(price: float) -> float:
        found = least(lambda load: block(load) + price * need(load), lambda load: end(load) + price * need(load))
        return found - price * budget

    low, high = 0.0, max(at(0.0), 1e-9) / budget
    if at(high / 64) <= at(0.0):
        return at(0.0)  # memory does not bind
    while at(2 * high) > at(high):
        high *= 4
    for _ in range(ROUNDS):
        third = (high - low) / 3
        if at(low + third) < at(high - third):
            low += third
        else:
            high -= third
    return max(at(0.0), at((low + high) / 2))


@lru_cache(maxsize=4096)
def in_flight(pipeline: Plan, microbatches: int) -> tuple[int, ...]:
    """How many micro-batches each stage keeps between forward and backward at most, by stage."""
    if pipeline.pipeline_degree == 1:
        return (1,)
    most = [0] * pipeline.num_stages
    for done in actions(pipeline, microbatches).values():
        alive = [0] * pipeline.num_stages
        for action in done:
            for what, stage, _ in action:
                alive[stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[what]
                most[stage] = max(most[stage], alive[stage])
    return tuple(most)
