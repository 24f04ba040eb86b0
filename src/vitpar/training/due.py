"""Agenda of a run, step by step: evaluation, checkpoint, rows of metrics, and whether the ranks agree to stop."""

from __future__ import annotations

import time
from dataclasses import dataclass

from vitpar.intervals import Interval
from vitpar.recipe.rates.shapes import RunLengths
from vitpar.training.saving.saver import Saver

LOOK_S = 5.0
"""Seconds between the points where ranks agree whether to continue, unless one step takes longer."""


@dataclass
class Due:
    """Things that are due after a step. Equal on all ranks."""

    step: int
    """Number of the step."""
    last: bool
    """Whether it is the last step of the run."""
    evaluation: bool
    """Whether to evaluate."""
    checkpoint: bool
    """Whether to save a checkpoint."""
    report: bool
    """Whether the row of the step is shown."""
    look: bool
    """Whether the ranks exchange their state, and rows of metrics are written."""
    stop: bool = False
    """Whether the run was asked to end. Known after the exchange."""

    @property
    def keeps(self) -> bool:
        """Whether the state of the run is evaluated or saved, so that it must be finite."""
        return self.evaluation or self.checkpoint or self.stop


class Agenda:
    """Schedule of what is due.

    run: lengths of the run, which intervals refer to.
    first: the first step of this process.
    eval_every: interval between evaluations; None for none, not even after the last step.
    log_every: interval between rows that are shown.
    """

    def __init__(
        self, saver: Saver, run: RunLengths, *, first: int, eval_every: Interval | None, log_every: Interval
    ) -> None:
        self._saver, self._first, self._last = saver, first, run.steps
        self._evaluates, by_time = eval_every is not None, eval_every is not None and eval_every.unit == "minutes"
        self._eval_every = 0 if eval_every is None or by_time else run.length(eval_every)
        self._eval_minutes = eval_every.number if eval_every is not None and by_time else 0.0
        self._log_every = run.length(log_every)
        self._look_at, self._evaluated_at = first, time.monotonic()

    def after(self, step: int, *, stuck: bool) -> Due:
        """Return what is due after `step`. stuck: whether the run has to end, since it makes no progress."""
        last = step == self._last
        evaluation = self._evaluates and (last or bool(self._eval_every and step % self._eval_every == 0))
        checkpoint = self._saver.due(step)
        report = step == self._first or step % self._log_every == 0 or last or evaluation or checkpoint or stuck
        return Due(step, last, evaluation, checkpoint, report, look=report or step >= self._look_at)

    @property
    def minutes(self) -> float:
        """Minutes since the last evaluation, or since the start."""
        return (time.monotonic() - self._evaluated_at) / 60

    def late(self, minutes: float) -> bool:
        """Return whether an evaluation is due by time. minutes: since the last one, equal on all ranks."""
        return 0 < self._eval_minutes <= minutes

    def evaluated(self) -> None:
        """Count the minutes until the next evaluation from now on."""
        self._evaluated_at = time.monotonic()

    def looked(self, step: int, step_seconds: float) -> None:
        """Plan the next exchange after `step`. step_seconds: duration of a step, equal on all ranks."""
        self._look_at = step + (max(1, int(LOOK_S / step_seconds)) if step_seconds else 1)
