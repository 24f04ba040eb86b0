"""Orders in which the ranks of a pipeline run forwards and backwards: those of torch's schedules, to price and draw."""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vitpar.strategy.plan import Plan

ActionPart = tuple[str, int, int]
"""(computation, stage, micro-batch); computations: F forward, I gradients of inputs, W of weights, B of both."""
ActionOrder = Mapping[int, Sequence[Sequence[ActionPart]]]
"""Actions of each pipeline rank in order, by index on the pp axis. Several parts in one action are overlapped."""


def action_order(plan: Plan, microbatches: int) -> ActionOrder:
    """Return the actions of every rank of the plan's pipeline, in the order in which torch's schedule runs them.

    The schedule must accept the number of micro-batches (``vitpar.strategy.batch.schedule_objection``).
    """
    ranks = plan.pipeline_degree
    if run := {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}.get(plan.schedule):
        return {pp: list(run(pp, ranks, microbatches)) for pp in range(ranks)}
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind = get_schedule_class(plan.schedule)
    # These attributes are all that a schedule reads from a stage to list its actions.
    stage: Any = SimpleNamespace(num_stages=plan.num_stages, group_size=ranks, group_rank=0, submod=None)
    # Adding sends and receives to the list takes longer than everything else here.
    bare = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda *_: None})
    order = bare([stage] * plan.virtual_stages, microbatches).pipeline_order
    parts = {pp: [_parts(action) for action in actions if action is not None] for pp, actions in order.items()}
    return {pp: [action for action in actions if action] for pp, actions in parts.items()}


def _parts(action: Any) -> list[ActionPart]:
    """Return the computations of one of torch's actions: two if it overlaps them, none if it only communicates."""
    every = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in action.sub_actions or (action,)]
    return [part for part in every if part[0] in "FIWB"]


# torch's schedules of one stage have lists, too, but run by other rules: in torch 2.13 the list of 1f1b starts the last
# rank's backwards with micro-batch 1.


def _gpipe(pp: int, p: int, m: int) -> Iterator[list[ActionPart]]:
    """Run all forwards, then all backwards. Source: GPipe (arXiv 1811.06965), section 2.3."""
    for computation in "FB":
        for number in range(m):
            yield [(computation, pp, number)]


def _one_forward_one_backward(pp: int, p: int, m: int) -> Iterator[list[ActionPart]]:
    """Run warm-up forwards, then a backward and a forward in turns, then the other backwards.

    Source: PipeDream-Flush (arXiv 2006.09503), section 3.1. The rank starts with as many forwards as there are ranks
    from it to the last one, so that its first gradient arrives next.
    """
    first = min(m, p - pp)
    for number in range(first):
        yield [("F", pp, number)]
    for number in range(m):
        yield [("B", pp, number)]
        if first + number < m:
            yield [("F", pp, first + number)]
