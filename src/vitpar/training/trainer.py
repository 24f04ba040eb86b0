"""The training loop, which is the same for every plan and every task."""

import gc
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from signal import Signals
from typing import Any

from vitpar.copying import upload_end
from vitpar.data.loader import Batch
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.stream.stream_set import ImageSet
from vitpar.intervals import Interval
from vitpar.launch.stop_request import STOPPING, StopRequest, signal_words
from vitpar.recipe.machine import large_batch_warning
from vitpar.recipe.rates.shapes import RunLengths
from vitpar.tasks.image_input import ImageInput
from vitpar.training.evaluate import Evaluation, evaluate
from vitpar.training.faults.watchdog import COMPUTING, EVALUATING, FINISHING, WAITING
from vitpar.training.metrics import StepLog, Worst
from vitpar.training.open_run import OpenRun
from vitpar.training.probe import collapse_warning, evaluate_neighbours
from vitpar.training.saving.saver import Saver
from vitpar.training.step import Garbage, Stepped
from vitpar.weights.folder import save_weights

RATE = "rate_"
"""Beginning of the names of schedules of the learning rate of parts of a model (``Task.schedules``)."""

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

    first: the first step of this process.
    eval_every: interval between evaluations; None for none, not even after the last step.
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


class Trainer(OpenRun):
    """Trainer of one run that is prepared. All ranks make it and call `run` together.

    Making it makes the model and the folder, and resumes, as `OpenRun` says.
    """

    def run(self) -> dict[str, Any]:
        """Train to the end, with evaluations, and save the final weights.

        Returns the summary, on every rank. At SIGTERM, SIGUSR1 or Ctrl-C to any rank, all save a checkpoint and end;
        the summary then says `stopped`.
        """
        with self.records or nullcontext():
            self.reporter.started(self.header)
            self.note(self.lr.warning, large_batch_warning(self.recipe, len(self.train_set)))
            log = StepLog(
                self.recipe, self.config, self.model, self.task.TRAINING_METRICS, self.signals, done=self.done
            )
            with StopRequest(notice="" if self.rank else STOPPING) as stop:
                last, ended = self._train(log, stop)
                self.saver.finish()
            summary = self._stopped(stop.asked) if ended else self._finish(last, log)
        if self.folder:
            self.folder.close()
        return summary

    def _train(self, log: StepLog, stop: StopRequest) -> tuple[Evaluation | None, bool]:
        """Train until the run ends or is asked to end.

        Returns the last evaluation of this process, if there was one, and whether the run was asked to end before.
        """
        first, last = self.done + 1, None
        agenda = Agenda(
            self.saver,
            self.lr.run,
            first=first,
            eval_every=None if self.val_set is None else self.recipe.train.eval_every,
            log_every=self.recipe.train.log_every,
        )
        log.resume_clock()
        loader = self.input.train_batches(self.train_set, self.samples, self.schedules.sizes)
        with closing(iter(loader)) as batches, Garbage() as garbage:
            for number, batch in enumerate(islice(batches, max(0, self.total_steps - self.done)), start=first):
                self.watchdog.beat(COMPUTING, number)
                log.data_ready()
                with self.checks.around(number) if self.checks else nullcontext():
                    log.add(number, batch, self.lr(number), self.step(number, batch))
                if self.folder:
                    self.shown.reached(number)
                self.done, self.samples = number, batch.samples
                stuck = self.non_finite.stuck(number, last=number == self.total_steps)
                due = agenda.after(number, stuck=stuck is not None)
                if due.look:
                    agenda.looked(number, self._look(due, log, stop, garbage, agenda))
                self.refuse(stuck)
                if due.keeps:
                    self.refuse(self.non_finite.spoiled(number, self.state.tensors()))
                if due.evaluation and self.val_set is not None:
                    last = self.evaluate(number, self.val_set)
                    agenda.evaluated()
                    due.checkpoint |= self.saver.best(number, last.metrics)
                    gc.collect()
                if due.checkpoint or due.stop:
                    self.saver.save(self.done, self.samples)
                if due.stop and not due.last:
                    return last, True
                if due.evaluation or due.checkpoint:
                    log.resume_clock()
                self.watchdog.beat(WAITING, number + 1)
        if warning := self.input.skipped(loader).words:
            self.note(f"training: {warning}")
        return last, False

    def step(self, number: int, batch: Batch) -> Stepped:
        """Run update `number`, counted from 1."""
        extra = self.schedules.others(number)
        if "weight_decay" in extra:
            self.optimizer.set_weight_decay(extra["weight_decay"])
        if "ema_decay" in extra and self.ema:
            self.ema.most = extra["ema_decay"]
        if self.teacher:
            self.teacher.follow(extra)
        if rates := {name.removeprefix(RATE): value for name, value in extra.items() if name.startswith(RATE)}:
            self.optimizer.set_rates(rates)
        if self.schedules.drop_share:
            self.model.set_drop_path(self.schedules.drop_share(number))
        if "image_size" in extra:
            self.model.take_image_size(int(extra["image_size"]))
        stepped = self._step(number, self.lr(number), *self.input.train_step(batch))
        return stepped._replace(extra=extra | stepped.extra)

    def evaluate(self, step: int, images: ImageSet) -> Evaluation:
        """Evaluate on all of `images`, with the averaged parameters if there are any, and report."""
        result = self._evaluated(images)
        row = {"kind": "eval", "step": step, **result.figures}
        if self.folder:
            self.folder.metric(row)
        self.reporter.evaluated(row)
        if result.warning:
            self.note(f"validation: {result.warning}")
        return result

    def _look(self, due: Due, log: StepLog, stop: StopRequest, garbage: Garbage, agenda: Agenda) -> float:
        """Exchange the state of the ranks, write rows of metrics, and return the duration of a step. Collective."""
        mine = Worst(stop.asked is not None, log.pace, self.saver.minutes, agenda.minutes, self.saver.writer.progress)
        rows, worst = log.flush(mine)
        due.stop, due.checkpoint = bool(worst.stop), due.checkpoint or self.saver.late(worst.minutes)
        due.evaluation |= agenda.late(worst.eval_minutes)
        self.record(rows, shown=due.report)
        self.saver.advance(worst.writing)
        garbage.maybe_collect(due.step, worst.step_seconds)
        self.watchdog.settled = True
        return worst.step_seconds

    def _evaluated(self, images: ImageSet) -> Evaluation:
        def progress(done: int) -> None:
            self.watchdog.beat(EVALUATING, self.done)
            self.reporter.evaluating(done, len(images))

        if self.task.AVERAGES:
            assert self.teacher is not None, "its features are evaluated"
            assert isinstance(images, ShardSet) and isinstance(self.train_set, ShardSet), "streams are refused"
            assert isinstance(self.input, ImageInput), "the task reads images"
            result = evaluate_neighbours(self.teacher, self.input, self.train_set, images, progress)
            self.note(collapse_warning(deviation := result.metrics["feature_std"], self._deviation))
            self._deviation = max(deviation, self._deviation)
            return result
        self.model.take_image_size(self.config.image_size)
        with self.ema.averaged() if self.ema else nullcontext():
            return evaluate(self.model, self.input, images, progress)

    def _stopped(self, signal: Signals | None) -> dict[str, Any]:
        """Return the summary of a run that a signal asked to end. signal: None if another rank received it."""
        path = None if self.recipe.checkpoint.never else str(self.saver.checkpoints.path(self.done))
        by = signal_words(signal) if signal else "a signal to another rank"
        further = "nothing was saved, since the recipe disables checkpoints"
        if path:
            further = f"`vitpar train --resume {self.path}` resumes it"
        words = f"stopped by {by} after step {self.done:,}"
        self.reporter.info(f"{words}: {further}")
        if self.folder:
            self.folder.event("stopped", text=words)
        return {"steps": self.done, "stopped": True, "checkpoint": path}

    def _finish(self, last: Evaluation | None, log: StepLog) -> dict[str, Any]:
        """Save the weights of a run that is complete, and return its summary. last: its last evaluation."""
        if last is None and self.val_set is not None:  # a resumed run may have no step left
            last = self._evaluated(self.val_set)
        self.watchdog.beat(FINISHING, 0)
        weights = self.path / "weights"
        with self.ema.averaged() if self.ema else nullcontext():
            save_weights(self.model, weights, self.recipe.to_toml(), self.class_names)
        summary = {
            **(last.figures if last else {}),
            "steps": self.done,
            "images_per_second": log.mean_rate,
            "weights": str(weights),
        }
        self.reporter.finished(summary)
        if self.folder and self.recipe.checkpoint.copy_to:
            self.note(upload_end(self.path, self.recipe.checkpoint.copy_to))
        return summary
