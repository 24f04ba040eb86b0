"""Orders in which the ranks of a pipeline run forwards and backwards, by schedule.

They are the orders of torch.distributed.pipelining (2.13), written from the papers;
``tests/strategy/test_pipeline_orders.py`` compares them with torch's.

p is the number of ranks, m the number of micro-batches, and v the number of stages on each rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import count

from vitpar.strategy.plan import Plan
from vitpar.strategy.stages import rank_of_stage

ActionPart = tuple[str, int, int]
"""(computation, stage, micro-batch); computations: F forward, I gradients of inputs, W of weights, B of both."""
ActionOrder = Mapping[int, Sequence[Sequence[ActionPart]]]
"""Actions of each pipeline rank in order, by index on the pp axis. Several parts in one action are overlapped."""
_Actions = Iterator[list[ActionPart]]
"""Actions of one rank in order."""
_Steps = Iterator[tuple[tuple[str, int], ...]]
"""Actions of one rank in order, without micro-batches: (computation, stage) of each part."""


def action_order(plan: Plan, microbatches: int) -> ActionOrder:
    """Return the actions of every rank of the plan's pipeline, in the order in which torch's schedule runs them.

    The schedule must accept the number of micro-batches (``vitpar.strategy.batch.schedule_objection``).
    """
    run, ranks = _RUNS[plan.schedule], plan.pipeline_degree
    stages: list[list[int]] = [[] for _ in range(ranks)]
    for stage in range(plan.num_stages):
        stages[rank_of_stage(stage, plan)].append(stage)
    return {pp: list(run(pp, ranks, microbatches, stages[pp])) for pp in range(ranks)}


def _numbered(steps: Callable[[int, int, int, Sequence[int]], _Steps]) -> Callable[..., _Actions]:
    """Return the function `steps` with micro-batches in its actions.

    Every stage takes its micro-batches in order, for each computation, so they follow from computations and stages
    alone. Parts of micro-batches that do not exist are left out.
    """

    @wraps(steps)
    def run(pp: int, p: int, m: int, stages: Sequence[int]) -> _Actions:
        forwards, backwards = {stage: count() for stage in stages}, {stage: count() for stage in stages}
        put_off: defaultdict[int, deque[int]] = defaultdict(deque)
        for action in steps(pp, p, m, stages):
            parts = []
            for computation, stage in action:
                if computation == "W":
                    number = put_off[stage].popleft()
                else:
                    number = next((forwards if computation == "F" else backwards)[stage])
                if computation == "I":
                    put_off[stage].append(number)
                if number < m:
                    parts.append((computation, stage, number))
            if parts:
                yield parts

    return run


def _gpipe(pp: int, p: int, m: int, stages: Sequence[int]) -> _Actions:
    """Run all forwards, then all backwards. Source: GPipe (arXiv 1811.06965), section 2.3."""
    (stage,) = stages
    for computation in "FB":
        for number in range(m):
            yield [(computation, stage, number)]


def _one_forward_one_backward(pp: int, p: int, m: int, stages: Sequence[int]) -> _Actions:
    """Run warm-up forwards, then a backward and a forward in turns, then the other backwards.

    Source: PipeDream-Flush (arXiv 2006.09503), section 3.1. The rank starts with as many forwards as there are ranks
    from it to the last one, so that its first gradient arrives next.
    """
    (stage,) = stages
    first = min(m, p - pp)
    for number in range(first):
        yield [("F", stage, number)]
    for number in range(m):
        yield [("B", stage, number)]
        if first + number < m:
            yield [("F", stage, first + number)]


def _rounds(m: int, p: int, stages: Sequence[int]) -> list[int]:
    """Return the stage of every forward of a rank under interleaved schedules, in order.

    Each stage computes a round of about p micro-batches before the rank's next stage does. Source: "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 2.2. There p
    divides m; torch allows as many equal rounds as m has multiples of p.
    """
    rounds = max(1, m // p)
    assert m % rounds == 0, f"{m} micro-batches do not divide into {rounds} rounds"
    return [stage for stage in stages for _ in range(m // rounds)] * rounds


def _warm_up(pp: int, p: int, m: int, v: int, hop: int) -> int:
    """Return the number of forwards before a rank's first backward under interleaved schedules.

    hop: additional forwards for each rank behind this one.
    """
    return min(m * v, (v - 1) * (m // max(1, m // p)) + hop * (p - 1 - pp))


@_numbered
def _interleaved_1f1b(pp: int, p: int, m: int, stages: Sequence[int]) -> _Steps:
    """Run 1F1B over several stages, those of a round one after the other (arXiv 2104.04473, section 2.2)."""
    forwards, backwards = _rounds(m, p, stages), _rounds(m, p, stages[::-1])
    # For each rank behind this one: a forward while the micro-batch goes there, and one while its gradient comes back.
    first = _warm_up(pp, p, m, len(stages), hop=2)
    for stage in forwards[:first]:
        yield (("F", stage),)
    for number, stage in enumerate(backwards):
        if first + number < len(forwards):
            yield (("F", forwards[first + number]),)
        yield (("B", stage),)


@_numbered
def _interleaved_zero_bubble(pp: int, p: int, m: int, stages: Sequence[int]) -> _Steps:
    """Run interleaved 1F1B with gradients of weights put off, so that they fill the idle time at the end.

    Source: "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2.1 (ZB-H1), over several stages. The rank
    puts off as many gradients of weights as there are ranks before it.
    """
    forwards, backwards = _rounds(m, p, stages), _rounds(m, p, stages[::-1])
    # A gradient that does not wait for those of weights is back after half as many forwards as under 1F1B.
    first = _warm_up(pp, p, m, len(stages), hop=1)
    for stage in forwards[:first]:
        yield (("F", stage),)
    for number, stage in enumerate(backwards):
        if first + number < len(forwards):
            yield (("F", forwards[first + number]),)
        yield (("I", stage),)
        if number >= pp:
            yield (("W", backwards[number - pp]),)
    for stage in backwards[max(0, len(backwards) - pp) :]:
        yield (("W", stage),)


@_numbered
def _zero_bubble_v(pp: int, p: int, m: int, stages: Sequence[int]) -> _Steps:
    """Run two stages in a V, with gradients of weights where they fill idle time.

    Source: "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 6 (ZB-V). `down` is the stage on the way to
    the last rank, `up` the one on the way back. Fewer than 2p - 1 micro-batches do not fill the V: then the order is
    that of 2p - 1, without those that are missing.
    """
    down, up = stages
    m = max(2 * p - 1, m)
    forward = (("F", down),)
    through_down, through_up = [(("I", down),), (("W", down),)], [(("F", up),), (("I", up),), (("W", up),)]
    # Until the first micro-batch comes back, the rank has time for the forwards of a way there and back.
    yield from [forward] * (2 * (p - pp) - 1)
    yield from [(("F", up),), forward] * pp
    yield from through_up * (p - pp)
    # Once gradients come down too, all four computations take turns, until the forwards of `down` are used up.
    for number in range(m - p):
        if number < m - (2 * p - 1 - pp):
            yield forward
        yield from through_down
        yield from through_up
    # The ranks before this one wait for gradients of inputs, so those of weights come last.
    yield from [(("I", down),), (("I", up),)] * pp
    yield from through_down * (p - pp)
    yield from [(("W", up),)] * pp
    yield from [(("W", down),)] * pp


@_numbered
def _dual_pipe_v(pp: int, p: int, m: int, stages: Sequence[int]) -> _Steps:
    """Run two stages in a V, and overlap the forward of one with the backward of the other.

    Source: "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.2.1, as the V-shaped half of DualPipe
    (github.com/deepseek-ai/DualPipe), whose eight steps these are. `hops` is the number of ranks behind this one.
    """
    down, up = stages
    hops = p - 1 - pp
    forward_down, forward_up = ("F", down), ("F", up)
    yield from [(forward_down,)] * (2 * hops)
    yield from [(forward_down,), (forward_up,)] * (pp + 1)
    yield from [(("I", up),), (("W", up),), (forward_up,)] * hops
    for number in range(m - 2 * p + 1 + pp):
        # The last rank has its own output at once: without overlap its first gradient leaves earlier.
        if number == 0 and hops == 0:
            yield from [(forward_down,), (("B", up),)]
        else:
            yield (forward_down, ("B", up))
        yield (forward_up, ("B", down))
    yield from [(("B", up),), (forward_up, ("B", down))] * hops
    # Of the last gradients, the second half puts off those of weights, which fill the idle time at the end.
    last = [up, down] * (pp + 1)
    yield from ((("B", stage),) for stage in last[: pp + 1])
    yield from ((("I", stage),) for stage in last[pp + 1 :])
    put_off = [*last[pp + 1 :], *[down] * hops]
    for stage in put_off[:hops]:
        yield from [(("W", stage),), (("I", down),)]
    yield from ((("W", stage),) for stage in put_off[hops:])


_RUNS: dict[str, Callable[[int, int, int, Sequence[int]], _Actions]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved1f1b": _interleaved_1f1b,
    "interleavedzerobubble": _interleaved_zero_bubble,
    "zbvzerobubble": _zero_bubble_v,
    "dualpipev": _dual_pipe_v,
}
"""Functions of (rank, p, m, the rank's stages) that run a rank's actions in order, by schedule."""
