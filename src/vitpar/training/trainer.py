"""The training loop, which is the same for every plan."""

from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from itertools import islice
from pathlib import Path
from signal import Signals
from typing import Any

import torch
import torch.distributed as dist

from vitpar.checkpoint import BestEvaluation, Checkpoint, Facts
from vitpar.data import Batch
from vitpar.errors import CheckpointError, DataError, RecipeError
from vitpar.launch.stop_request import STOPPING, StopRequest
from vitpar.launch.world_group import broadcast_json
from vitpar.text import count
from vitpar.training.begin import begin
from vitpar.training.build import build
from vitpar.training.evaluate import Evaluation, evaluate
from vitpar.training.events import Logged, Reporter, RunHeader
from vitpar.training.faults.debug_checks import DebugChecks
from vitpar.training.faults.watchdog import COMPUTING, EVALUATING, FINISHING, SAVING, WAITING, Watchdog
from vitpar.training.image_data import ImageSet
from vitpar.training.input import Input
from vitpar.training.input_watch import InputWatch
from vitpar.training.metrics import StepLog, Worst
from vitpar.training.optim.optimizer import CosineWithWarmup, state_size
from vitpar.training.prepare import Prepared
from vitpar.training.recipe.machine import large_batch_warning
from vitpar.training.run_folder import RunFolder
from vitpar.training.saving.resume import allowed_changes, checkpoints_of, find, same_run
from vitpar.training.saving.saver import Saver, TrainingState, texts
from vitpar.training.step import Garbage, Stepped, nothing
from vitpar.training.tracked import Tracked
from vitpar.weights.folder import save_weights

LOOK_S = 5.0
"""Seconds between the points where ranks agree whether to continue, unless one step takes longer."""


class Trainer:
    """One run that is prepared. All ranks make it and call `run` together.

    reporter: shows the run; only rank 0 uses it. The run's log.txt gets the same events.
    command: command line of the run, for env.json.
    watchdog: records all progress and ends the process if there is none; None for no watchdog.
    """

    def __init__(
        self,
        prepared: Prepared,
        device: torch.device,
        *,
        reporter: Reporter,
        command: Sequence[str] = (),
        watchdog: Watchdog | None = None,
    ) -> None:
        self.watchdog = watchdog or Watchdog()
        recipe, plan, run_dir, resume = prepared.recipe, prepared.plan, prepared.run_dir, prepared.resume
        self.recipe, self.plan, self.device, self.origin = recipe, plan, device, prepared.origin
        self.train_set, self.val_set, self.config = prepared.train_set, prepared.val_set, prepared.config
        data = {"the training data": self.train_set, "the validation data": self.val_set}
        trained = build(recipe, self.config, plan, device, data)
        self.model, self.optimizer, self.ema = trained.model, trained.optimizer, trained.ema
        self.scaler, self.non_finite = trained.scaler, trained.non_finite
        self.total_steps = recipe.total_steps(len(self.train_set))
        self.lr = CosineWithWarmup(
            recipe.optimizer.lr, self.total_steps, recipe.warmup_steps(len(self.train_set)), recipe.lr_schedule.min_lr
        )
        self.input = Input(recipe, self.model)
        self.rank = dist.get_rank()
        self.state = TrainingState(self.model, self.optimizer, self.ema, self.scaler)
        self.checks = DebugChecks(self.model, self.state, recipe) if recipe.faults.debug_checks else None
        if self.checks:
            self.watchdog.doing = self.checks.doing
        self.done, self.samples = 0, 0
        resuming = resume is not None and run_dir is not None and same_run(run_dir, resume)
        self.folder = RunFolder(run_dir, recipe, plan, resuming=resuming) if self.rank == 0 else None
        self.reporter: Reporter = Logged(self.folder, reporter) if self.folder else Reporter()
        self.tracked: Tracked | None = None
        path = broadcast_json(str(self.folder.path) if self.folder else None)
        assert path is not None, "rank 0 has a folder"
        self.path = Path(path)
        self.watchdog.folder = self.path / "hang"
        self.saver = Saver(
            checkpoints_of(self.path),
            self.state,
            recipe.checkpoint,
            interval=recipe.checkpoint.interval(len(self.train_set), recipe.train.batch_size),
            last=self.total_steps,
            texts=self._texts,
            log=self.folder.log if self.folder else lambda text: None,
            beat=lambda: self.watchdog.beat(SAVING, self.done),
        )
        self._step = trained.step(
            after_gradients=self.checks.gradients if self.checks else nothing, before_update=self.saver.writer.staged
        )
        if self.folder:
            self.saver.checkpoints.clear()
        try:
            checkpoint = find(resume, self.reporter.note) if resume else None
            self.attention = trained.choose_attention(checkpoint.facts.attention if checkpoint else None)
            if checkpoint:
                self._resume(checkpoint, prepared.allow_change, resuming)
            elif recipe.model.weights is not None:
                self.reporter.info(begin(self.model, recipe, self.train_set, self.ema))
            cached = self.input.cache(self.train_set, self.val_set)
        except (CheckpointError, DataError, RecipeError):
            if self.folder:
                self.folder.discard()
            raise
        if self.folder:
            kernels: dict[str, object] = {
                "compiled": self.model.execution.compile,
                "attention": self.attention.to_json(),
                "optimizer": self.optimizer.implementation,
            }
            kernels["threads"] = torch.get_num_threads()
            self.folder.begin(recipe, plan, command, self.done, kernels)
            self.tracked = self.reporter = Tracked(self.reporter, recipe, self.folder, self.done)
        self.watch = InputWatch(recipe, self.input.workers, self.input.local.cores, first=self.done + 1)
        for message in (*prepared.messages, *filter(None, [cached])):
            self.reporter.info(message)
        self._note(*prepared.warnings, *trained.warnings, self.attention.warning)
        self.watchdog.outlive()

    def run(self) -> dict[str, Any]:
        """Train to the end, with evaluations, and save the final weights.

        Returns the summary, on every rank. At SIGTERM, SIGUSR1 or Ctrl-C to any rank, all save a checkpoint and end;
        the summary then says `stopped`.
        """
        with self.tracked or nullcontext():
            summary = self._run()
        if self.folder:
            self.folder.close()
        return summary

    def _run(self) -> dict[str, Any]:
        train = self.recipe.train
        eval_every = train.eval_every or max(1, round(len(self.train_set) / train.batch_size))
        self._start()
        log = StepLog(self.recipe, self.config, self.model, self.done)
        last: Evaluation | None = None
        log.resume_clock()
        loader = self.input.train_batches(self.train_set, start=self.samples)
        # With several ranks the launching process prints the notice once.
        notice = STOPPING if dist.get_world_size() == 1 else ""
        with StopRequest(notice=notice) as stop, closing(iter(loader)) as batches, Garbage() as garbage:
            first = look_at = self.done + 1
            pace = 0.0
            for number, batch in enumerate(islice(batches, max(0, self.total_steps - self.done)), start=first):
                self.watchdog.beat(COMPUTING, number)
                log.data_ready()
                with self.checks.around(number) if self.checks else nullcontext():
                    log.add(number, batch, self.lr(number), self.step(number, batch))
                final = number == self.total_steps
                due = self.val_set is not None and (final or number % eval_every == 0)
                stuck = self.non_finite.stuck(number)
                self.done, self.samples = number, batch.samples
                save, stopped = self.saver.due(number), False
                logged = bool(due or final or stuck or save or number % train.log_every == 0 or number == first)
                if logged or number >= look_at:
                    mine = Worst(stop.asked is not None, pace, self.saver.minutes, self.saver.writer.progress)
                    rows, worst = log.flush(mine)
                    stopped, save = bool(worst.stop), save or self.saver.late(worst.minutes)
                    pace = rows[-1]["step_ms"] / 1e3
                    look_at = number + (max(1, int(LOOK_S / worst.step_seconds)) if worst.step_seconds else 1)
                    self._record(rows, shown=logged)
                    self.saver.advance(worst.writing)
                    garbage.maybe_collect(number, worst.step_seconds)
                    self.watchdog.settled = True
                self._refuse(stuck)
                if due or save or stopped:  # state that is not finite must not be evaluated or saved
                    self._refuse(self.non_finite.spoiled(number, self.state.tensors()))
                if due and self.val_set is not None:
                    last = self.evaluate(number, self.val_set)
                    save = self.saver.best(number, last.top1) or save
                    garbage.collect()
                if save or stopped:
                    self.saver.save(self.done, self.samples)
                if stopped and not final:
                    return self._stopped(stop.asked)
                if due or save:
                    log.resume_clock()
                self.watchdog.beat(WAITING, number + 1)
            self.saver.finish()
        if last is None and self.val_set is not None:  # a resumed run may have no step left
            last = self._evaluated(self.val_set)
        if warning := self.input.warning(loader):
            self.reporter.note(f"training: {warning}")
        return self._finish(last, log)

    def step(self, number: int, batch: Batch) -> Stepped:
        """Run update `number`, counted from 1."""
        return self._step(number, self.lr(number), *self.input.train_step(batch))

    def evaluate(self, step: int, images: ImageSet) -> Evaluation:
        """Evaluate on all of `images`, with the averaged parameters if there are any, and report."""
        result = self._evaluated(images)
        row = {"kind": "eval", "step": step, **result.figures}
        if self.folder:
            self.folder.metric(row)
        self.reporter.evaluated(row)
        if result.warning:
            self.reporter.note(f"validation: {result.warning}")
        return result

    def _evaluated(self, images: ImageSet) -> Evaluation:
        def progress(done: int) -> None:
            self.watchdog.beat(EVALUATING, self.done)
            self.reporter.evaluating(done, len(images))

        with self.ema.averaged() if self.ema else nullcontext():
            return evaluate(self.model, self.input, images, progress)

    @property
    def _paths(self) -> dict[str, Any]:
        """Choices that change the last digits of losses, as in `Facts`."""
        compiled, attention = self.model.execution.compile, self.attention.backend
        return {"compiled": compiled, "attention": attention, "optimizer": self.optimizer.implementation}

    def _texts(self, step: int, samples: int, best: BestEvaluation | None) -> dict[str, str]:
        scale, data = self.state.loss_scale, self.train_set.fingerprint
        facts = Facts(step=step, samples=samples, data=data, loss_scale=scale, best=best, **self._paths)
        return texts(facts, self.recipe, self.config, self.plan, self.train_set.class_names)

    def _resume(self, checkpoint: Checkpoint, allow_change: Sequence[str], same_folder: bool) -> None:
        """Resume from `checkpoint`.

        same_folder: whether the run continues in its own folder.
        """
        changed = allowed_changes(checkpoint, self.recipe, self.train_set, allow_change)
        self.samples = checkpoint.facts.samples
        # With another batch size, resume at the step that corresponds to the samples seen.
        self.done = checkpoint.facts.step
        if "train.batch_size" in changed:
            self.done = self.samples // self.recipe.train.batch_size
        if same_folder and self.done != checkpoint.facts.step:
            raise CheckpointError(
                f"with train.batch_size {self.recipe.train.batch_size} the step numbers of the run in '{self.path}' "
                "would change: name another folder with --run-dir"
            )
        self.state.load(checkpoint, changed)
        for name, mine in self._paths.items():
            if (before := getattr(checkpoint.facts, name)) not in (None, mine):
                self.reporter.note(f"{name} was {before} and is {mine}: losses may differ in their last digits")
        if same_folder:
            self.saver.resume(checkpoint)
        complete = "; the run is complete, so only the evaluation is repeated" if self.done >= self.total_steps else ""
        self.reporter.info(f"resuming from {checkpoint.path}: {count(self.done, 'step')} done{complete}")

    def _start(self) -> None:
        images = len(self.train_set), len(self.val_set) if self.val_set is not None else 0
        sizes = *state_size(self.model, self.recipe), *images, self.total_steps
        header = (self.recipe, self.config, self.plan, str(self.device), *sizes, str(self.path), self.origin)
        self.reporter.started(RunHeader(*header))
        self._note(self.lr.warning, large_batch_warning(self.recipe, len(self.train_set)))

    def _note(self, *warnings: str | None) -> None:
        for warning in filter(None, warnings):
            self.reporter.note(warning)

    def _record(self, rows: Sequence[dict[str, Any]], shown: bool) -> None:
        rows, diverged = self.non_finite.until_diverged(rows)
        if self.folder:
            self._note(self.folder.restore())
            self.folder.trained(rows)
        self._refuse(diverged)
        if shown:
            self.reporter.stepped(rows[-1])
            self._note(self.watch.look(rows))

    def _refuse(self, sentence: str | None) -> None:
        """Raise RecipeError with `sentence`, unless it is None. It is equal on all ranks, so all stop together."""
        if sentence is None:
            return
        with suppress(CheckpointError):
            self.saver.finish()
        if self.folder:
            self.folder.log(f"error: {sentence}")
        raise RecipeError(sentence)

    def _stopped(self, signal: Signals | None) -> dict[str, Any]:
        """End a run that a signal asked to end, and return its summary.

        signal: that this rank received; None if another rank did.
        """
        self.saver.finish()
        path = None if self.recipe.checkpoint.never else str(self.saver.checkpoints.path(self.done))
        by = signal.name if signal else "a signal to another rank"
        further = "nothing was saved, since the recipe disables checkpoints"
        if path:
            further = f"`vitpar train --resume {self.path}` resumes it"
        self.reporter.info(f"stopped by {by} after step {self.done:,}: {further}")
        return {"steps": self.done, "stopped": True, "checkpoint": path}

    def _finish(self, last: Evaluation | None, log: StepLog) -> dict[str, Any]:
        self.watchdog.beat(FINISHING, 0)
        weights = self.path / "weights"
        with self.ema.averaged() if self.ema else nullcontext():
            save_weights(self.model, weights, self.recipe.to_toml(), self.train_set.class_names)
        summary = {
            **(last.figures if last else {}),
            "steps": self.done,
            "images_per_second": log.mean_rate,
            "weights": str(weights),
        }
        self.reporter.finished(summary)
        return summary
