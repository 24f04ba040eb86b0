"""Orders of pipeline actions under the schedules of torch.distributed.pipelining, without a process group."""

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from vitpar.parallel.pipeline import CLASSES
from vitpar.strategy import Plan
from vitpar.strategy.pipeline_orders import ActionOrder, ActionPart


def torch_order(plan: Plan, microbatches: int) -> ActionOrder:
    """Return the actions of every pipeline rank that torch's schedule runs.

    Schedules of one stage run here, on a stage that only records. The list that they have of their actions is not what
    they run: in torch 2.13 the list of 1f1b starts the last rank's backwards with micro-batch 1. The others run their
    lists.
    """
    kind = CLASSES[plan.schedule]
    if issubclass(kind, PipelineScheduleSingle):
        return {pp: _recorded(kind, pp, plan.num_stages, microbatches) for pp in range(plan.num_stages)}
    # These attributes are all that a schedule reads from a stage to list its actions.
    stage: Any = SimpleNamespace(num_stages=plan.num_stages, group_size=plan.pipeline_degree, group_rank=0, submod=None)
    assert issubclass(kind, PipelineScheduleMulti)
    # Adding sends and receives to the list takes longer than everything else here.
    bare = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda *_: None})
    found = bare([stage] * plan.virtual_stages, microbatches).pipeline_order
    parts = {pp: [_parts(action) for action in actions if action is not None] for pp, actions in found.items()}
    return {pp: [action for action in actions if action] for pp, actions in parts.items()}


def _recorded(kind: type[PipelineScheduleSingle], pp: int, stages: int, microbatches: int) -> list[list[ActionPart]]:
    """Run a step of a schedule on a stage that records forwards and backwards."""
    found: list[list[ActionPart]] = []

    def nothing(*_: Any, **__: Any) -> list[Any]:
        return []

    stage: Any = SimpleNamespace(
        num_stages=stages,
        stage_index=pp,
        group_size=stages,
        group_rank=pp,
        is_last=False,
        has_backward=True,
        submod=None,
        forward_one_chunk=lambda number, *_, **__: found.append([("F", pp, number)]),
        backward_one_chunk=lambda number, *_, **__: found.append([("B", pp, number)]),
        get_fwd_recv_ops=nothing,
        get_fwd_send_ops=nothing,
        get_bwd_recv_ops=nothing,
        get_bwd_send_ops=nothing,
        perform_reduce_grad=nothing,
    )
    bare = type(kind.__name__, (kind,), {"_initialize_stage": nothing})
    bare(stage, microbatches)._step_microbatches([()] * microbatches, [{}] * microbatches)
    return found


def _parts(action: Any) -> list[ActionPart]:
    """Return the computations of one of torch's actions: two if it overlaps them, none if it only communicates."""
    every = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in action.sub_actions or (action,)]
    return [part for part in every if part[0] in "FIWB"]
