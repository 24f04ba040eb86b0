"""A run that is open: its model on this rank, its folder, and all that its steps use (``vitpar.training.trainer``)."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitpar.checkpoint.folder import BestEvaluation, Checkpoint, Facts
from vitpar.checkpoint.index import CLASSES, CONFIG, PLAN, RECIPE, STATE
from vitpar.errors import CheckpointError, DataError, RecipeError
from vitpar.launch.world_group import broadcast_json
from vitpar.models.families import config_to_json
from vitpar.parallel.attention import AttentionChoice
from vitpar.recipe.rates.schedules import Schedules
from vitpar.strategy.plan_json import plan_text
from vitpar.text import count
from vitpar.training.begin import begin, begin_adapters
from vitpar.training.build import TRAINING_DATA, TrainingComponents, build
from vitpar.training.events import Reporter, RunHeader
from vitpar.training.faults.debug_checks import DebugChecks
from vitpar.training.faults.watchdog import SAVING, Watchdog
from vitpar.training.metrics import InputWatch
from vitpar.training.optim.optimizer import state_size
from vitpar.training.prepare import Prepared
from vitpar.training.recorded import Recorded
from vitpar.training.run_folder import RunFolder
from vitpar.training.saving.resume import allowed_changes, checkpoints_of, find, same_run, teacher_fingerprint
from vitpar.training.saving.saver import Saver, TrainingState
from vitpar.training.signals import LayerSignals
from vitpar.training.step import nothing


class OpenRun:
    """A run on one rank. Collective: making it builds the model and the folder, and resumes or loads initial weights.

    reporter: shows the run; only rank 0 uses it. The run's log.txt gets the same events.
    command: command line of the run, for env.json.
    watchdog: records all progress and ends the process if there is none; None for no watchdog.

    Raises CheckpointError, DataError and RecipeError for what cannot be used; a new folder is then removed.
    """

    folder: RunFolder | None
    """Folder of the run on rank 0; None on other ranks, which have its `path`."""
    reporter: Reporter
    """Receiver of events, on rank 0: writes to the folder and to trackers, and then shows."""
    saver: Saver
    """Saver of checkpoints."""
    attention: AttentionChoice
    """Attention kernel of the run."""

    def __init__(
        self,
        prepared: Prepared,
        device: torch.device,
        *,
        reporter: Reporter,
        command: Sequence[str] = (),
        watchdog: Watchdog | None = None,
    ) -> None:
        self.prepared, self.device = prepared, device
        self.recipe, self.plan, self.config, self.task = prepared.recipe, prepared.plan, prepared.config, prepared.task
        self.train_set, self.val_set = prepared.train_set, prepared.val_set
        if self.task.AVERAGES and self.train_set.num_classes < 2:
            self.val_set = None  # without labels
        self.shown, self.watchdog, self.rank = reporter, watchdog or Watchdog(), dist.get_rank()
        schedules = Schedules.of(self.recipe, len(self.train_set), self.config)
        self.lr = schedules.lr
        self.schedules = replace(schedules, named={**schedules.named, **self.task.schedules(self.lr.run)})
        self.total_steps = self.lr.run.steps
        self.done, self.samples, self._deviation = 0, 0, 0.0
        data = {TRAINING_DATA: self.train_set, "the validation data": self.val_set}
        place = None if prepared.run_dir is None else str(prepared.run_dir)
        trained = build(self.recipe, self.config, self.plan, device, self.task, data, {"--run-dir": place})
        self.model, self.optimizer, self.ema = trained.model, trained.optimizer, trained.ema
        self.teacher, self.non_finite, self.input = trained.teacher, trained.non_finite, trained.input()
        self._teacher_fingerprint = teacher_fingerprint(self.recipe)
        center = None if self.teacher is None else self.teacher.center
        others = {} if center is None else {"teacher.center": center}
        self.state = TrainingState(self.model, self.optimizer, self.ema, trained.scaler, others)
        self.checks = DebugChecks(self.model, self.state, self.recipe) if self.recipe.faults.debug_checks else None
        self._make_folder(reporter)
        self.signals = LayerSignals(self.model, self.optimizer, self.lr.run.length(self.recipe.train.log_every))
        self._step = trained.step(
            after_gradients=self.checks.gradients if self.checks else nothing,
            before_update=self.saver.writer.staged,
            signals=self.signals,
        )
        try:
            changed = self._begin(trained)
            cached = self.input.cache(self.train_set, self.val_set)
        except (CheckpointError, DataError, RecipeError):
            if self.folder:
                self.folder.discard()
            raise
        self.header = self._header(changed)
        if self.folder:
            kernels = {**self._paths, "attention": self.attention.to_json(), "threads": torch.get_num_threads()}
            facts = self.header.facts(self.done)
            self.folder.begin(self.recipe, self.plan, self.task, command, self.done, kernels, facts)
        self.watch = InputWatch(
            self.recipe, self.input.workers, self.input.local.cores, first=self.done + 1, small=self.input.small_samples
        )
        for message in filter(None, (prepared.reason, *prepared.hints, cached)):
            self.reporter.info(message)
        self.note(*prepared.warnings, *trained.warnings, self.attention.warning)
        self.watchdog.outlive()

    def note(self, *warnings: str | None) -> None:
        """Report warnings; None for none."""
        for warning in filter(None, warnings):
            self.reporter.note(warning)

    def record(self, rows: Sequence[dict[str, Any]], shown: bool) -> None:
        """Write rows of metrics, and end the run if it diverged. shown: whether to report the last one. Collective."""
        rows, diverged = self.non_finite.until_diverged(rows)
        if self.folder:
            self.note(self.folder.restore())
            self.folder.trained(rows)
        self.refuse(diverged)
        if shown:
            self.reporter.stepped(rows[-1])
            self.note(self.watch.look(rows))

    def refuse(self, sentence: str | None) -> None:
        """Raise RecipeError with `sentence`, unless it is None. It is equal on all ranks, so all stop together."""
        if sentence is None:
            return
        with suppress(CheckpointError):
            self.saver.finish()
        if self.folder:
            self.folder.log(f"error: {sentence}")
            self.folder.event("error", text=sentence)
        raise RecipeError(sentence)

    @property
    def class_names(self) -> Sequence[str] | None:
        """Names of the model's outputs; None if they have none."""
        return self.train_set.class_names if self.task.OUTPUTS_ARE_LABELS else None

    def _make_folder(self, reporter: Reporter) -> None:
        """Make the folder of the run on rank 0, and what writes to it."""
        run_dir, resume = self.prepared.run_dir, self.prepared.resume
        self._same_folder = resume is not None and run_dir is not None and same_run(run_dir, resume)
        self.folder = None if self.rank else RunFolder(run_dir, self.recipe, self.plan, resuming=self._same_folder)
        self.records = Recorded(self.folder, self.recipe, self.task, reporter) if self.folder else None
        self.reporter = self.records or Reporter()
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
            saved=lambda step: self.folder.event("save", step=step) if self.folder else None,
            warn=lambda text: self.reporter.note(text),
            beat=lambda: self.watchdog.beat(SAVING, self.done),
        )
        if self.folder:
            self.saver.checkpoints.clear()

    def _begin(self, trained: TrainingComponents) -> str:
        """Resume, or load initial weights. Returns the settings that differ from those before, in words."""
        resume = self.prepared.resume
        checkpoint = find(resume, self.reporter.note) if resume else None
        self.attention = trained.choose_attention(checkpoint.facts.attention if checkpoint else None)
        if checkpoint:
            return self._resume(checkpoint)
        if self.recipe.model.weights is not None:
            self.reporter.info(begin(self.model, self.recipe, self.task, self.train_set, self.ema))
        if self.recipe.lora.weights is not None:
            self.reporter.info(begin_adapters(self.model, self.recipe, self.ema))
        return ""

    def _resume(self, checkpoint: Checkpoint) -> str:
        """Resume from `checkpoint`. Returns what `_begin` does."""
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
        words = "; ".join(changed.values())
        if changed:
            self.reporter.info(f"changed settings: {words}")
        complete = "; the run is complete, so only the evaluation is repeated" if self.done >= self.total_steps else ""
        self.reporter.info(f"resuming from {checkpoint.path}: {count(self.done, 'step')} done{complete}")
        return words

    def _header(self, changed: str) -> RunHeader:
        parameters, state_bytes = state_size(self.model, self.recipe)
        return RunHeader(
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
            changed=changed,
        )

    @property
    def _paths(self) -> dict[str, Any]:
        """Choices that change the last digits of losses, as in `Facts`."""
        compiled, attention = self.model.execution.compile, self.attention.backend
        return {"compiled": compiled, "attention": attention, "optimizer": self.optimizer.implementation}

    def _texts(self, step: int, samples: int, best: BestEvaluation | None) -> dict[str, str]:
        """Return the text files of a checkpoint, by name."""
        facts = Facts(
            step=step,
            samples=samples,
            data=self.train_set.fingerprint,
            loss_scale=self.state.loss_scale,
            best=best,
            teacher=self._teacher_fingerprint,
            **self._paths,
        )
        names = self.class_names
        return {
            STATE: facts.model_dump_json(indent=1),
            RECIPE: self.recipe.to_toml(),
            CONFIG: json.dumps(config_to_json(self.config), indent=1),
            PLAN: plan_text(self.plan),
            **({} if names is None else {CLASSES: json.dumps(names)}),
        }
