"""What is due after a step of a run: evaluation, checkpoint, rows of metrics, and whether the ranks agree to stop."""

from __future__ import annotations

from dataclasses import dataclass

from vitpar.training.saving.saver import Saver

LOOK_S = 5.0
"""Seconds between the points where ranks agree whether to continue, unless one step takes longer."""


@dataclass
class Due:
    """What is due after a step. Equal on all ranks."""

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

    first: the first step of this process.
    last: the last step of the run.
    eval_every: steps between evaluations; 0 for none, not even after the last step.
    log_every: steps between rows that are shown.
    """

    def __init__(self, saver: Saver, *, first: int, last: int, eval_every: int, log_every: int) -> None:
        self._saver, self._first, self._last = saver, first, last
        self._eval_every, self._log_every = eval_every, log_every
        self._look_at = first

    def after(self, step: int, *, stuck: bool) -> Due:
        """Return what is due after `step`. stuck: whether the run has to end, since it makes no progress."""
        last = step == self._last
        evaluation = bool(self._eval_every) and (last or step % self._eval_every == 0)
        checkpoint = self._saver.due(step)
        report = step == self._first or step % self._log_every == 0 or last or evaluation or checkpoint or stuck
        return Due(step, last, evaluation, checkpoint, report, look=report or step >= self._look_at)

    def looked(self, step: int, step_seconds: float) -> None:
        """Plan the next exchange after `step`. step_seconds: duration of a step, equal on all ranks."""
        self._look_at = step + (max(1, int(LOOK_S / step_seconds)) if step_seconds else 1)
