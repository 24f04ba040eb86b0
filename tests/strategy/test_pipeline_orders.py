"""Orders of pipeline actions, compared with what the schedules of torch.distributed.pipelining run."""

import pytest

from helpers.torch_orders import torch_order
from vitpar.strategy import SCHEDULES, Plan
from vitpar.strategy.batch import schedule_objection
from vitpar.strategy.pipeline_orders import action_order

STAGES = {"one": (1,), "two": (2,), "several": (1, 2, 3, 5)}
"""Numbers of stages per rank that are compared, by the schedule's requirement. torch also takes one for several."""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_order_is_that_of_torch(schedule: str) -> None:
    compared = 0
    for pp in (2, 3, 4, 5, 8):
        for virtual_stages in STAGES[SCHEDULES[schedule].stages]:
            plan = Plan(pp=pp, schedule=schedule, virtual_stages=virtual_stages)
            for microbatches in (*range(1, 22), 24, 31, 40):
                if schedule_objection(plan, microbatches) is None:
                    assert action_order(plan, microbatches) == torch_order(plan, microbatches), (plan, microbatches)
                    compared += 1
    assert compared > 75
