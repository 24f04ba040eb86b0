"""Failures and money: how often to save, the share of useful time, and the cost of a complete training.

Failures are independent and equally likely at any time (a Poisson process). The job stops at the first failure of any
device, restarts, and repeats the steps since its last checkpoint. The time of a training of T seconds of steps, with a
checkpoint after every t seconds that stalls it for d, is

    M exp(R / M) (exp((t + d) / M) - 1) T / t

for a mean time M between failures of the job and R seconds of a restart. The interval that minimises it is close to
√(2 d M). Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22 (2006), equations 20 and 37; Young (1974) has the first term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

STALL, RESTART = 1.0, 120.0
"""Seconds that training waits for a checkpoint, and of a restart, unless they are given."""
_LIMIT = 300.0
"""Exponent beyond which a training practically never ends."""


@dataclass(frozen=True)
class Conditions:
    """Conditions under which a cluster works."""

    mtbf_hours: float | None = None
    """Mean time between failures of one device, in hours; None for no failures. Llama 3 had 419 unexpected
    interruptions of 16,384 GPUs in 54 days (arXiv 2407.21783): 50,700 hours."""
    price: float | None = None
    """Price of an hour of one device, in any currency; None if it is unknown."""
    stall: float = STALL
    """Seconds that training waits for a checkpoint."""
    restart: float = RESTART
    """Seconds from a failure to the first step after it."""


def interval(stall: float, between: float) -> float:
    """Return the seconds of steps between checkpoints that minimise the time of a training.

    stall: seconds that training waits for a checkpoint. between: mean seconds between failures.
    """
    if stall >= 2 * between:
        return between
    ratio = math.sqrt(stall / (2 * between))
    return math.sqrt(2 * stall * between) * (1 + ratio / 3 + ratio**2 / 9) - stall


def duration(work: float, every: float, between: float, conditions: Conditions) -> float:
    """Return the expected seconds of a training.

    work: seconds of all steps. every: seconds of steps between checkpoints. between: mean seconds between failures.
    """
    exponents = (every + conditions.stall) / between, conditions.restart / between
    if sum(exponents) > _LIMIT:
        return math.inf
    return between * math.exp(exponents[1]) * math.expm1(exponents[0]) * work / every


def goodput(steps: int, step_seconds: float, devices: int, conditions: Conditions) -> dict[str, Any]:
    """Return a training of `steps` steps under conditions, with the best interval between checkpoints.

    `job_mtbf_hours` and the interval are None without failures; `interval_seconds` is that of the steps between
    checkpoints. `useful` is the share of the time in which steps advance the training. `seconds`, `device_hours` and
    `cost` are None for a training that would practically never end; `cost` also without a price.
    """
    work, between, every = steps * step_seconds, None, None
    seconds = work
    if conditions.mtbf_hours is not None:
        between = conditions.mtbf_hours * 3600 / devices
        every = min(steps, max(1, round(interval(conditions.stall, between) / step_seconds)))
        seconds = duration(work, every * step_seconds, between, conditions)
    hours = None if seconds == math.inf else seconds * devices / 3600
    return {
        "devices": devices,
        "job_mtbf_hours": between and between / 3600,
        "interval_steps": every,
        "interval_seconds": every and every * step_seconds,
        "useful": work / seconds,
        "seconds": None if hours is None else seconds,
        "device_hours": hours,
        "cost": None if hours is None or conditions.price is None else hours * conditions.price,
    }
