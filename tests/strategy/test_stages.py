"""Assignment of blocks to stages, of stages to ranks, and the order of their actions."""

from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from helpers.sentences import says
from vitpar.strategy import SCHEDULES, Plan, parse, rank_of_stage, split_blocks, stages_of_rank
from vitpar.strategy.batch import schedule_objection
from vitpar.strategy.pipeline_orders import ActionPart, action_order


def sizes(stages: tuple[range, ...]) -> list[int]:
    return [len(blocks) for blocks in stages]


def stage_costs(cuts: list[int], costs: list[float]) -> list[float]:
    """Return the cost of each stage between neighbouring `cuts`; `costs` are those of embed, blocks and head."""
    blocks = [sum(costs[1 + start : 1 + end]) for start, end in pairwise(cuts)]
    blocks[0] += costs[0]
    blocks[-1] += costs[-1]
    return blocks


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "expected"),
    [(12, 4, [3, 3, 3, 3]), (10, 4, [3, 3, 2, 2]), (5, 5, [1, 1, 1, 1, 1]), (7, 1, [7])],
)
def test_even_split_has_larger_stages_first(num_blocks: int, num_stages: int, expected: list[int]) -> None:
    assert sizes(split_blocks(num_blocks, num_stages, "even")) == expected


def test_stages_are_contiguous() -> None:
    assert split_blocks(5, 2, "even") == (range(0, 3), range(3, 5))
    assert split_blocks(5, 3, (1, 3, 1)) == (range(0, 1), range(1, 4), range(4, 5))


@given(st.data())
def test_balanced_split_is_optimal(data: st.DataObject) -> None:
    """The costliest stage is as cheap as possible, then the sum of squares is smallest.

    Integer costs make this exact.
    """
    num_blocks = data.draw(st.integers(1, 9))
    num_stages = data.draw(st.integers(1, num_blocks))
    costs = data.draw(st.lists(st.integers(0, 9), min_size=num_blocks + 2, max_size=num_blocks + 2))

    def score(cuts: list[int]) -> tuple[float, float]:
        stages = stage_costs(cuts, costs)
        return max(stages), sum(cost * cost for cost in stages)

    every_split = [[0, *inner, num_blocks] for inner in combinations(range(1, num_blocks), num_stages - 1)]
    chosen = split_blocks(num_blocks, num_stages, "balanced", costs)
    cuts = [0, *(blocks.stop for blocks in chosen)]
    assert cuts in every_split
    assert score(cuts) == min(map(score, every_split))


def test_balanced_split_is_even_for_equal_or_zero_costs() -> None:
    assert sorted(sizes(split_blocks(10, 4, "balanced", [0, *[0.1] * 10, 0]))) == [2, 2, 3, 3]
    assert sum(sizes(split_blocks(4, 2, "balanced", [0.0] * 6))) == 4
    assert sizes(split_blocks(4, 2, "balanced", [1e200] * 6)) == [2, 2]


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "how", "message"),
    [
        (5, 8, "even", "5 blocks cannot fill 8 stages: use at most 5 stages"),
        (1, 2, (1, 0), "1 block cannot fill 2 stages: use at most 1 stage"),
        (12, 4, (4, 4, 4), "split 4,4,4 is for 3 stages but the plan has 4: give 4 numbers with sum 12"),
        (12, 2, (6, 5), "split 6,5 has 11 blocks but the model has 12: give 2 numbers with sum 12"),
        (12, 3, (6, 0, 6), "split 6,0,6 gives 0 blocks to stage 1: give every stage at least 1"),
        (12, 2, (13, -1), "split 13,-1 gives -1 blocks to stage 1: give every stage at least 1"),
        (12, 1, (), "split () is for 0 stages but the plan has 1: give 1 number with sum 12"),
    ],
)
def test_invalid_splits_are_refused(num_blocks: int, num_stages: int, how, message: str) -> None:
    with says(message):
        split_blocks(num_blocks, num_stages, how)


def test_interleaved_stages_loop_over_the_ranks() -> None:
    plan = replace(parse("dp2xpp3"), schedule="interleaved1f1b", virtual_stages=2)
    assert [stages_of_rank(rank, plan) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert stages_of_rank(0, parse("dp4")) == (0,)


def test_v_shaped_stages_run_down_and_up_the_ranks() -> None:
    plan = replace(parse("dp2xpp3"), schedule="zbvzerobubble", virtual_stages=2)
    assert [stages_of_rank(rank, plan) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [rank_of_stage(stage, plan) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


# orders of actions


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
