"""Pipeline schedules and their requirements on a plan, as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch.distributed.pipelining."""

    name: str
    """Name in plans."""
    stages: str = "one"
    """Stages per rank: "one", "two", or "several" (2 or more)."""
    v_shaped: bool = False
    """Whether stages go down the ranks and back up, so the first and last stage are on rank 0. Otherwise stage s is on
    rank s mod pp."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed in separate passes, the latter in otherwise idle time."""
    rounds: bool = False
    """Whether micro-batches have to divide into equal rounds of about pp."""
    needs: int = 0
    """Minimum number of micro-batches, as a multiple of the number of stages."""


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
"""Schedules by name, with the requirements of torch 2.13 (torch/distributed/pipelining/schedules.py)."""
