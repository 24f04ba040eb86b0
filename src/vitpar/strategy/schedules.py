"""Pipeline schedules as data: what each asks of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """One schedule, which torch.distributed.pipelining runs.

    stages: how many a rank holds: "one", "two", or "several" (2 or more).
    v_shaped: of two stages the first goes down the ranks and the second back up, so the last stage is on the first
    rank; else stages go round the ranks.
    splits_backward: gradients of inputs and of weights are computed apart, so that waiting ranks do the latter.
    rounds: micro-batches are taken in equal rounds of about pp. needs: the least micro-batches, in stages.
    """

    name: str
    stages: str = "one"
    v_shaped: bool = False
    splits_backward: bool = False
    rounds: bool = False
    needs: int = 0


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("1f1b", needs=1),
        Schedule("gpipe"),
        Schedule("interleaved1f1b", stages="several", rounds=True),
        Schedule("interleavedzerobubble", stages="several", splits_backward=True, rounds=True),
        Schedule("zbvzerobubble", stages="two", v_shaped=True, splits_backward=True),
        Schedule("dualpipev", stages="two", v_shaped=True, splits_backward=True, needs=1),
    )
}
"""By name. The limits are those of torch 2.13 (torch/distributed/pipelining/schedules.py)."""
