"""When a run's state is written, and which checkpoints are kept."""

from __future__ import annotations

import time
from collections.abc import Callable

from vitpar.checkpoint import Best, Checkpoint, Checkpoints, Writer
from vitpar.checkpoint.writer import Saved
from vitpar.training.recipe.sections import CheckpointSection
from vitpar.training.saving.training_state import TrainingState


class Saver:
    """Writes the checkpoints of one run. All ranks have one and call it together.

    interval, last: steps between checkpoints (0: none by step), and the last of the run. texts: the files beside the
    tensors, of step, samples and the best evaluation. log: told of what was saved. beat: called before each wait for a
    disk. `save`, `advance` and `finish` are collective, and raise CheckpointError where a checkpoint cannot be written.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: TrainingState,
        settings: CheckpointSection,
        *,
        interval: int,
        last: int,
        texts: Callable[[int, int, Best | None], dict[str, str]],
        log: Callable[[str], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.checkpoints, self._state, self._settings = checkpoints, state, settings
        self._interval, self._last, self._texts, self._log, self._beat = interval, last, texts, log, beat
        self._writer = Writer()
        self._best: Best | None = None
        self._earlier: set[int] = set()
        self._saved: set[int] = set()
        self._since = time.monotonic()

    @property
    def minutes(self) -> float:
        """Since the last checkpoint, or the start."""
        return (time.monotonic() - self._since) / 60

    def go_on(self, found: Checkpoint) -> None:
        """The run goes on from `found`. What other checkpoints came after it are of another course, but stay until
        there is one of this."""
        self._best = found.facts.best
        self._earlier = {step for step in self.checkpoints.steps() if step <= found.facts.step}

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`, as far as that tells."""
        if self._settings.never:
            return False
        by_step = self._interval and step % self._interval == 0
        return bool(by_step or step == self._last or (self._settings.first and step == 1))

    def late(self, minutes: float) -> bool:
        """Whether one is due when the last was `minutes` ago, which all ranks have to agree on."""
        return bool(self._settings.every_minutes) and minutes >= (self._settings.every_minutes or 0)

    def best(self, step: int, top1: float) -> bool:
        """Take in an evaluation. Whether it is the best so far, and so to be kept."""
        if not self._settings.keep_best or (self._best is not None and top1 <= self._best.top1):
            return False
        self._best = Best(step=step, top1=top1)
        return True

    def save(self, step: int, samples: int) -> None:
        """Write the run as it is after `step`, and then remove what is not kept; nothing where it is there already or
        no checkpoints are wanted. Where the recipe says so it is written while training goes on, once `staged`."""
        if self._settings.never or step in self._saved:
            return
        begun = time.monotonic()
        self.finish()
        self._beat()
        self._since = time.monotonic()
        self._saved.add(step)
        kept = self._settings.kept(sorted(self._earlier | self._saved), self._best.step if self._best else None)
        texts = self._texts(step, samples, self._best)
        self._writer.begin(
            self.checkpoints.path(step), self._state.tensors(), texts, lambda: self.checkpoints.keep(kept)
        )
        if not self._settings.asynchronous:
            self.finish()
        self._log(f"saving step {step:,}: training waited {time.monotonic() - begun:.3f} s")

    def staged(self) -> None:
        """Call it before the state of the run changes."""
        self._writer.staged()

    @property
    def progress(self) -> float:
        """Of this rank with the checkpoint that is being written."""
        return self._writer.progress

    def advance(self, worst: float) -> None:
        """Go on with the checkpoint that is being written. worst: the largest `progress` of all ranks."""
        self._tell(self._writer.advance(worst))

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is whole."""
        self._beat()
        self._tell(self._writer.finish())

    def _tell(self, saved: Saved | None) -> None:
        if saved:
            self._log(f"{saved.folder.name} was whole after {saved.seconds:.2f} s, {saved.bytes / 1e6:,.1f} MB")
