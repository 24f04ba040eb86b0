"""Orders of pipeline actions, compared with what the schedules of torch.distributed.pipelining run."""

from collections import Counter

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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_computes_every_micro_batch_once(schedule: str) -> None:
    plan = Plan(pp=3, schedule=schedule, virtual_stages=STAGES[SCHEDULES[schedule].stages][-1])
    parts = [part for actions in action_order(plan, 9).values() for action in actions for part in action]
    assert max(Counter(parts).values()) == 1
    every = {(stage, number) for stage in range(plan.num_stages) for number in range(9)}
    assert {part[1:] for part in parts if part[0] == "F"} == every
    whole, inputs, weights = ({part[1:] for part in parts if part[0] == kind} for kind in "BIW")
    assert whole | inputs == every and not whole & inputs and inputs == weights
