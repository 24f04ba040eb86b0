"""Orders of pipeline actions: of schedules of one stage, as torch runs them; of the others, complete and possible."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from vitpar.strategy import SCHEDULES, Plan, rank_of_stage
from vitpar.strategy.batch import schedule_objection
from vitpar.strategy.pipeline_orders import ActionPart, action_order


def recorded(kind: type[PipelineScheduleSingle], pp: int, stages: int, microbatches: int) -> list[list[ActionPart]]:
    """Run a step of a schedule on a stage that records forwards and backwards."""
    found: list[list[ActionPart]] = []

    def nothing(*_: Any, **__: Any) -> list[Any]:
        return []

    sends = ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops", "perform_reduce_grad")
    stage: Any = SimpleNamespace(
        **{"num_stages": stages, "stage_index": pp, "group_size": stages, "group_rank": pp},
        **{"is_last": False, "has_backward": True, "submod": None},
        forward_one_chunk=lambda number, *_, **__: found.append([("F", pp, number)]),
        backward_one_chunk=lambda number, *_, **__: found.append([("B", pp, number)]),
        **dict.fromkeys(sends, nothing),
    )
    bare = type(kind.__name__, (kind,), {"_initialize_stage": nothing})
    bare(stage, microbatches)._step_microbatches([()] * microbatches, [{}] * microbatches)
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_order_of_one_stage_is_that_of_torch(schedule: str) -> None:
    kind: Any = get_schedule_class(schedule)
    for pp in (2, 3, 5, 8):
        plan = Plan(pp=pp, schedule=schedule)
        for microbatches in (n for n in (*range(1, 18), 31) if schedule_objection(plan, n) is None):
            order = action_order(plan, microbatches)
            assert order == {rank: recorded(kind, rank, pp, microbatches) for rank in range(pp)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_computes_each_micro_batch_of_its_stages_once(schedule: str) -> None:
    virtual = {"one": 1, "two": 2, "several": 3}[SCHEDULES[schedule].stages]
    plan = Plan(pp=3, schedule=schedule, virtual_stages=virtual)
    for microbatches in (n for n in range(1, 22) if schedule_objection(plan, n) is None):
        for pp, actions in action_order(plan, microbatches).items():
            done = Counter(part for action in actions for part in action)
            for stage in (stage for stage in range(plan.num_stages) if rank_of_stage(stage, plan) == pp):
                for number in range(microbatches):
                    forward, whole, halves = (done[kind, stage, number] for kind in "FBI")
                    assert forward == 1 == whole + halves and halves == done["W", stage, number]
            assert {number for _, _, number in done} == {*range(microbatches)} and {kind for kind, *_ in done} <= {
                *"FBIW"
            }
            assert {rank_of_stage(stage, plan) for _, stage, _ in done} == {pp}
