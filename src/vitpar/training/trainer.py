"""The training loop, which is the same for every plan and every task."""

from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from itertools import islice
from pathlib import Path
from signal import Signals
from typing import Any

import torch
import torch.distributed as dist

from vitpar.checkpoint.folder import BestEvaluation, Checkpoint, Facts
from vitpar.copying import upload_end
from vitpar.data.loader import Batch
from vitpar.errors import CheckpointError, DataError, RecipeError
from vitpar.launch.stop_request import STOPPING, StopRequest, signal_words
from vitpar.launch.world_group import broadcast_json
from vitpar.tasks.image_data import ImageSet
from vitpar.text import count
from vitpar.training.begin import begin, begin_adapters
from vitpar.training.build import TRAINING_DATA, TrainingComponents, build
from vitpar.training.due import Agenda, Due
from vitpar.training.evaluate import Evaluation, evaluate
from vitpar.training.events import Logged, Reporter, RunHeader
from vitpar.training.faults.debug_checks import DebugChecks
from vitpar.training.faults.watchdog import COMPUTING, EVALUATING, FINISHING, SAVING, WAITING, Watchdog
from vitpar.training.input_watch import InputWatch
from vitpar.training.metrics import StepLog, Worst
from vitpar.training.optim.optimizer import state_size
from vitpar.training.prepare import Prepared
from vitpar.training.recipe.machine import large_batch_warning
from vitpar.training.recipe.schedules import Schedules
from vitpar.training.run_folder import RunFolder
from vitpar.training.saving.resume import allowed_changes, checkpoints_of, find, same_run, teacher_fingerprint
from vitpar.training.saving.saver import Saver, TrainingState, texts
from vitpar.training.signals import LayerSignals
from vitpar.training.step import Garbage, Stepped, nothing
from vitpar.training.tracked import Tracked
from vitpar.weights.folder import save_weights


class Trainer:
    """One run that is prepared. All ranks make it and call `run` together.

    Making it does nothing. `open` makes the model and the run's folder, and resumes; `run` does so if it was not done.

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
        self.prepared, self.device, self.command = prepared, device, command
        self.recipe, self.plan, self.config, self.task = prepared.recipe, prepared.plan, prepared.config, prepared.task
        self.train_set, self.val_set = prepared.train_set, prepared.val_set
        self.reporter = self.shown = reporter
        self.watchdog = watchdog or Watchdog()
        self.rank = dist.get_rank()
        self.schedules = Schedules.of(self.recipe, len(self.train_set), self.config)
        self.lr = self.schedules.lr
        self.total_steps = self.lr.run.steps
        self.done, self.samples = 0, 0
        self.folder: RunFolder | None = None
        self._tracked: Tracked | None = None
        self._is_open = False

    def open(self) -> None:
        """Make the model and the folder of the run, and resume or load initial weights. Collective.

        Raises CheckpointError, DataError and RecipeError for what cannot be used; a new folder is then removed.
        """
        data = {TRAINING_DATA: self.train_set, "the validation data": self.val_set}
        folder = None if self.prepared.run_dir is None else str(self.prepared.run_dir)
        trained = build(self.recipe, self.config, self.plan, self.device, self.task, data, {"--run-dir": folder})
        self.model, self.optimizer, self.ema = trained.model, trained.optimizer, trained.ema
        self.scaler, self.non_finite = trained.scaler, trained.non_finite
        self.input = trained.input()
        self._teacher_fingerprint = teacher_fingerprint(self.recipe)
        self.state = TrainingState(self.model, self.optimizer, self.ema, self.scaler)
        self.checks = DebugChecks(self.model, self.state, self.recipe) if self.recipe.faults.debug_checks else None
        self._make_folder()
        every = self.lr.run.length(self.recipe.train.log_every)
        self.signals = LayerSignals(self.model, self.optimizer, every)
        self._step = trained.step(
            after_gradients=self.checks.gradients if self.checks else nothing,
            before_update=self.saver.writer.staged,
            signals=self.signals,
        )
        try:
            cached = self._begin(trained)
        except (CheckpointError, DataError, RecipeError):
            if self.folder:
                self.folder.discard()
            raise
        if self.folder:
            self.folder.begin(self.recipe, self.plan, self.task, self.command, self.done, self._kernels)
            self._tracked = Tracked(self.reporter, self.recipe, self.folder, self.done)
            self.reporter = self._tracked
        self.watch = InputWatch(
            self.recipe, self.input.workers, self.input.local.cores, first=self.done + 1, small=self.input.small_samples
        )
        for message in (*self.prepared.messages, *filter(None, [cached])):
            self.reporter.info(message)
        self._note(*self.prepared.warnings, *trained.warnings, self.attention.warning)
        self.watchdog.outlive()
        self._is_open = True

    def run(self) -> dict[str, Any]:
        """Train to the end, with evaluations, and save the final weights.

        Returns the summary, on every rank. At SIGTERM, SIGUSR1 or Ctrl-C to any rank, all save a checkpoint and end;
        the summary then says `stopped`.
        """
        if not self._is_open:
            self.open()
        with self._tracked or nullcontext():
            summary = self._run()
        if self.folder:
            self.folder.close()
        return summary

    def step(self, number: int, batch: Batch) -> Stepped:
        """Run update `number`, counted from 1."""
        extra = self.schedules.others(number)
        if "weight_decay" in extra:
            self.optimizer.set_weight_decay(extra["weight_decay"])
        if self.schedules.drop_path:
            self.model.set_drop_path(self.schedules.drop_path.share(number))
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
            self.reporter.note(f"validation: {result.warning}")
        return result

    def _make_folder(self) -> None:
        """Make the folder of the run on rank 0, and what writes to it."""
        run_dir, resume = self.prepared.run_dir, self.prepared.resume
        self._same_folder = resume is not None and run_dir is not None and same_run(run_dir, resume)
        if self.rank == 0:
            self.folder = RunFolder(run_dir, self.recipe, self.plan, resuming=self._same_folder)
        self.reporter = Logged(self.folder, self.reporter, self.task) if self.folder else Reporter()
        path = broadcast_json(str(self.folder.path) if self.folder else None)
        assert path is not None, "rank 0 has a folder"
        self.path = Path(path)
        self.watchdog.folder = self.path / "hang"
        self.saver = Saver(
            checkpoints_of(self.path),
            self.state,
            self.recipe.checkpoint,
            metric=self.task.best,
            interval=self.lr.run.length(every) if (every := self.recipe.checkpoint.every).unit != "minutes" else 0,
            last=self.total_steps,
            texts=self._texts,
            log=self.folder.log if self.folder else lambda text: None,
            warn=lambda text: self.reporter.note(text),
            beat=lambda: self.watchdog.beat(SAVING, self.done),
        )
        if self.folder:
            self.saver.checkpoints.clear()

    def _begin(self, trained: TrainingComponents) -> str | None:
        """Resume, or load initial weights; cache images. Returns a message about the cache."""
        resume = self.prepared.resume
        checkpoint = find(resume, self.reporter.note) if resume else None
        self.attention = trained.choose_attention(checkpoint.facts.attention if checkpoint else None)
        if checkpoint:
            self._resume(checkpoint)
        else:
            if self.recipe.model.weights is not None:
                self.reporter.info(begin(self.model, self.recipe, self.task, self.train_set, self.ema))
            if self.recipe.lora.weights is not None:
                self.reporter.info(begin_adapters(self.model, self.recipe, self.ema))
        return self.input.cache(self.train_set, self.val_set)

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Resume from `checkpoint`."""
        changed = allowed_changes(checkpoint, self.recipe, self.task, self.train_set, self.prepared.allow_change)
        self.samples = checkpoint.facts.samples
        # With another batch size, resume at the step that corresponds to the samples seen.
        self.done = checkpoint.facts.step
        if "train.batch_size" in changed:
            self.done = self.samples // self.recipe.train.batch_size
        if self._same_folder and self.done != checkpoint.facts.step:
            raise CheckpointError(
                f"with train.batch_size {self.recipe.train.batch_size} the step numbers of the run in '{self.path}' "
                "would change: name another folder with --run-dir"
            )
        self.state.load(checkpoint, changed)
        for name, mine in self._paths.items():
            if (before := getattr(checkpoint.facts, name)) not in (None, mine):
                self.reporter.note(f"{name} was {before} and is {mine}: losses may differ in their last digits")
        if self._same_folder:
            self.saver.resume(checkpoint)
        if changed:
            self.reporter.info(f"changed settings: {'; '.join(changed.values())}")
        complete = "; the run is complete, so only the evaluation is repeated" if self.done >= self.total_steps else ""
        self.reporter.info(f"resuming from {checkpoint.path}: {count(self.done, 'step')} done{complete}")

    def _run(self) -> dict[str, Any]:
        self._start()
        train, first = self.recipe.train, self.done + 1
        agenda = Agenda(
            self.saver,
            self.lr.run,
            first=first,
            eval_every=None if self.val_set is None else train.eval_every,
            log_every=train.log_every,
        )
        metrics = self.task.TRAINING_METRICS
        log = StepLog(self.recipe, self.config, self.model, metrics, self.signals, self.done)
        last: Evaluation | None = None
        log.resume_clock()
        loader = self.input.train_batches(self.train_set, self.samples, self.schedules.sizes)
        notice = "" if self.rank else STOPPING
        with StopRequest(notice=notice) as stop, closing(iter(loader)) as batches, Garbage() as garbage:
            for number, batch in enumerate(islice(batches, max(0, self.total_steps - self.done)), start=first):
                self.watchdog.beat(COMPUTING, number)
                log.data_ready()
                with self.checks.around(number) if self.checks else nullcontext():
                    log.add(number, batch, self.lr(number), self.step(number, batch))
                if self.folder:
                    self.shown.reached(number)
                stuck = self.non_finite.stuck(number, last=number == self.total_steps)
                self.done, self.samples = number, batch.samples
                due = agenda.after(number, stuck=stuck is not None)
                if due.look:
                    agenda.looked(number, self._look(due, log, stop, garbage, agenda))
                self._refuse(stuck)
                if due.keeps:
                    self._refuse(self.non_finite.spoiled(number, self.state.tensors()))
                if due.evaluation and self.val_set is not None:
                    last = self.evaluate(number, self.val_set)
                    agenda.evaluated()
                    due.checkpoint |= self.saver.best(number, last.metrics)
                    garbage.collect()
                if due.checkpoint or due.stop:
                    self.saver.save(self.done, self.samples)
                if due.stop and not due.last:
                    return self._stopped(stop.asked)
                if due.evaluation or due.checkpoint:
                    log.resume_clock()
                self.watchdog.beat(WAITING, number + 1)
            self.saver.finish()
        if last is None and self.val_set is not None:  # a resumed run may have no step left
            last = self._evaluated(self.val_set)
        if warning := self.input.warning(loader):
            self.reporter.note(f"training: {warning}")
        return self._finish(last, log)

    def _look(self, due: Due, log: StepLog, stop: StopRequest, garbage: Garbage, agenda: Agenda) -> float:
        """Exchange the state of the ranks, write rows of metrics, and return the duration of a step. Collective."""
        mine = Worst(stop.asked is not None, log.pace, self.saver.minutes, agenda.minutes, self.saver.writer.progress)
        rows, worst = log.flush(mine)
        due.stop, due.checkpoint = bool(worst.stop), due.checkpoint or self.saver.late(worst.minutes)
        due.evaluation |= agenda.late(worst.eval_minutes)
        self._record(rows, shown=due.report)
        self.saver.advance(worst.writing)
        garbage.maybe_collect(due.step, worst.step_seconds)
        self.watchdog.settled = True
        return worst.step_seconds

    def _evaluated(self, images: ImageSet) -> Evaluation:
        def progress(done: int) -> None:
            self.watchdog.beat(EVALUATING, self.done)
            self.reporter.evaluating(done, len(images))

        self.model.take_image_size(self.config.image_size)
        with self.ema.averaged() if self.ema else nullcontext():
            return evaluate(self.model, self.input, images, progress)

    @property
    def _paths(self) -> dict[str, Any]:
        """Choices that change the last digits of losses, as in `Facts`."""
        compiled, attention = self.model.execution.compile, self.attention.backend
        return {"compiled": compiled, "attention": attention, "optimizer": self.optimizer.implementation}

    @property
    def _kernels(self) -> dict[str, Any]:
        """Kernels that the run computes with, for env.json."""
        return {**self._paths, "attention": self.attention.to_json(), "threads": torch.get_num_threads()}

    @property
    def _class_names(self) -> Sequence[str] | None:
        """Names of the model's outputs; None if they have none."""
        return self.train_set.class_names if self.task.OUTPUTS_ARE_LABELS else None

    def _texts(self, step: int, samples: int, best: BestEvaluation | None) -> dict[str, str]:
        scale, data = self.state.loss_scale, self.train_set.fingerprint
        facts = Facts(
            step=step,
            samples=samples,
            data=data,
            loss_scale=scale,
            best=best,
            teacher=self._teacher_fingerprint,
            **self._paths,
        )
        return texts(facts, self.recipe, self.config, self.plan, self._class_names)

    def _start(self) -> None:
        parameters, state_bytes = state_size(self.model, self.recipe)
        header = RunHeader(
            recipe=self.recipe,
            task=self.task,
            config=self.config,
            plan=self.plan,
            device=str(self.device),
            parameters=parameters,
            state_bytes=state_bytes,
            train_samples=len(self.train_set),
            val_samples=len(self.val_set) if self.val_set is not None else 0,
            steps=self.total_steps,
            folder=str(self.path),
            compiled=self.model.execution.compile,
            origin=self.prepared.origin,
        )
        self.reporter.started(header)
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
        by = signal_words(signal) if signal else "a signal to another rank"
        further = "nothing was saved, since the recipe disables checkpoints"
        if path:
            further = f"`vitpar train --resume {self.path}` resumes it"
        self.reporter.info(f"stopped by {by} after step {self.done:,}: {further}")
        return {"steps": self.done, "stopped": True, "checkpoint": path}

    def _finish(self, last: Evaluation | None, log: StepLog) -> dict[str, Any]:
        self.watchdog.beat(FINISHING, 0)
        weights = self.path / "weights"
        with self.ema.averaged() if self.ema else nullcontext():
            save_weights(self.model, weights, self.recipe.to_toml(), self._class_names)
        summary = {
            **(last.figures if last else {}),
            "steps": self.done,
            "images_per_second": log.mean_rate,
            "weights": str(weights),
        }
        self.reporter.finished(summary)
        if self.folder and self.recipe.checkpoint.copy_to:
            self._note(upload_end(self.path, self.recipe.checkpoint.copy_to))
        return summary
