"""Pipeline bubble: schedules, replayed, compared with closed forms from the papers."""

from dataclasses import replace

import pytest

from vitpar.planner.cost.pipeline import ActionCost, duration, replay
from vitpar.strategy import Plan, parse
from vitpar.strategy.pipeline_orders import ActionPart, action_order


def piped(ranks: int, schedule: str, virtual_stages: int = 1) -> Plan:
    return replace(parse(f"pp{ranks}"), schedule=schedule, virtual_stages=virtual_stages)


def waiting(plan: Plan, microbatches: int) -> int:
    """Return a rank's idle time in units of a forward, by replaying the schedule."""
    return duration(action_order(plan, microbatches), plan.num_stages) - 3 * plan.virtual_stages * microbatches


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 5), (3, 2), (4, 3), (8, 2)])
def test_replayed_bubble_matches_the_closed_forms(ranks: int, rounds: int) -> None:
    m = rounds * ranks
    # Three units per rank after the first, for gpipe, 1f1b and interleaved 1f1b (arXiv 2104.04473, section 2.2).
    assert waiting(piped(ranks, "gpipe"), m) == 3 * (ranks - 1)
    assert waiting(piped(ranks, "1f1b"), m) == 3 * (ranks - 1)
    assert waiting(piped(ranks, "interleaved1f1b", 1), m) == 3 * (ranks - 1)  # with one stage per rank it is 1f1b
    assert waiting(piped(ranks, "interleaved1f1b", 3), m) == 3 * (ranks - 1)
    # (p - 1)·(F + I - W) for zero bubble (arXiv 2401.10241, table 1). In a V shape only the last ranks' delay remains.
    assert waiting(piped(ranks, "interleavedzerobubble", 2), m) == ranks - 1
    assert waiting(piped(ranks, "zbvzerobubble", 2), m) == ranks - 1
    # (p - 1)·(F&B + B - 3W), if forward and backward of a pair run one after the other (table in DeepSeek's DualPipe).
    assert waiting(piped(ranks, "dualpipev", 2), m) == 2 * (ranks - 1)


def actions(text: str) -> list[list[ActionPart]]:
    """Parse `0F1 0F2+0B1`: stage, kind and micro-batch of each action; "+" joins two overlapped actions."""
    return [[(part[1], int(part[0]), int(part[2])) for part in word.split("+")] for word in text.split()]


def test_rank_waits_for_the_inputs_of_an_action() -> None:
    alone = {0: actions("0F0 0I0 0W0"), 1: actions("1F0 1I0 1W0")}
    assert duration(alone, 2) == 5  # 0F0, 1F0, 1I0, 0I0, 0W0
    # A full backward computes weight gradients before rank 0 gets its input gradient.
    assert duration({**alone, 1: actions("1F0 1B0")}, 2) == 6
    with pytest.raises(AssertionError, match="the ranks of the pipeline deadlock"):
        duration({0: actions("0B0 0F0"), 1: actions("1F0 1B0")}, 2)


def test_overlapped_pair_sends_after_both_are_done() -> None:
    one_by_one = {0: actions("0F0 0F1 0B0 0B1"), 1: actions("1F0 1B0 1F1 1B1")}
    assert duration(one_by_one, 2) == 9
    pair = {0: actions("0F0 0F1+0B0 0B1"), 1: actions("1F0 1B0 1F1 1B1")}
    assert duration(pair, 2) == 11  # 0F1 ends at 2, but its output is sent at 6, when 0B0 ends


def test_transfer_time_delays_the_next_stage() -> None:
    two = {0: actions("0F0 0B0"), 1: actions("1F0 1B0")}
    events, _ = replay(two, 2, lambda *part: ActionCost(2.0), lambda source, target: (0.5 + target, ()))
    assert [(e.computation, e.stage, e.start, e.end) for e in events] == [
        ("F", 0, 0, 2),
        ("F", 1, 3.5, 5.5),
        ("B", 1, 5.5, 7.5),
        ("B", 0, 8, 10),
    ]


def test_messages_of_one_hop_queue() -> None:
    """Four outputs are ready each second, and each takes three seconds to send."""
    two = {0: actions("0F0 0F1 0F2 0F3"), 1: actions("1F0 1F1 1F2 1F3")}
    events, _ = replay(two, 2, lambda *part: ActionCost(1.0), lambda source, target: (3.0, ()))
    assert [event.start for event in events if event.stage == 1] == [4, 7, 10, 13]


def test_messages_share_network_cards_with_collectives() -> None:
    """A message of 2 s and an action that sends all of its 1 s each get half of their card until the action ends."""
    two = {0: actions("0F0 0F1"), 1: actions("1F0")}

    def events(share: float, left: float = 0.0) -> tuple[list[float], dict[int, float]]:
        """Return (ends of stage 0's actions and begin of stage 1's, ends of transfers that outlast actions)."""

        def cost(computation: str, stage: int, number: int) -> ActionCost:
            sends = stage == 0 and number == 1
            return ActionCost(1.0, (("in", stage), ("out", stage)), share * sends, left * sends, True)

        found, ends = replay(two, 2, cost, lambda source, target: (2.0, (("out", source), ("in", target))))
        return [e.start if e.stage else e.end for e in found if e.microbatch == 0 or e.stage == 0], ends

    assert events(0.0) == ([1, 2, 3], {})
    assert events(1.0) == ([1, 3, 4], {})
    # A card that the action uses half of the time: 1.5 s for both until then, then half a second.
    assert events(0.5)[0] == pytest.approx([1, 2.5, 3.5])
    # A transfer of 3 s that begins when half of the message is sent, and the message of the second action.
    began, ends = events(0.0, 3.0)
    assert began == pytest.approx([1, 2, 4]) and ends[0] == pytest.approx(8)
