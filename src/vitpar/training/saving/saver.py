"""Saving: the state that a run needs to resume under any plan, when it is saved, and which checkpoints are kept."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from torch import Tensor

from vitpar.checkpoint.folder import BestEvaluation, Checkpoint, Checkpoints, Scale
from vitpar.checkpoint.index import AVERAGES, MOMENTS, PARAMETERS
from vitpar.checkpoint.reader import load_tensors
from vitpar.checkpoint.writer import Saved, Writer
from vitpar.copying import upload_checkpoint
from vitpar.object_store import ObjectPath, parse_place
from vitpar.parallel import ParallelModel
from vitpar.recipe.sections.running import CheckpointSection
from vitpar.sharded import sharded_as
from vitpar.tasks import Metric
from vitpar.training.optim.average import EMA
from vitpar.training.optim.loss_scale import LossScaler
from vitpar.training.optim.optimizer import ShardedOptimizer


class TrainingState:
    """State of a run that its steps change: model, optimizer, averages, loss scale and other tensors.

    others: further tensors by name, equal on all ranks.

    Random state is not kept: initial values, order, augmentation and drop-path are functions of the seed and of the
    position in the data.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: ShardedOptimizer,
        ema: EMA | None,
        scaler: LossScaler | None,
        others: Mapping[str, Tensor] = {},
    ) -> None:
        self._model, self._optimizer, self._ema, self._scaler = model, optimizer, ema, scaler
        self._others = others

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors, sharing memory: `model.…`, `optimizer.exp_avg.…`, `ema.…`, and others.

        Each copy of a shared parameter has tensors of its own, which `owners` relates to those of its owner.
        """
        named = {name: p.detach() for name, p in self._model.named_parameters()}
        parameters = {f"{PARAMETERS}{name}": p for name, p in named.items()}
        moments = {f"{MOMENTS}{name}": tensor for name, tensor in self._optimizer.state().items()}
        means = self._ema.average if self._ema else {}  # local shards
        averages = {f"{AVERAGES}{name}": sharded_as(named[name], means[name]) for name in means}
        return {**parameters, **moments, **averages, **self._others}

    def owners(self, names: Iterable[str]) -> dict[str, str]:
        """Return the name of the owner's tensor for each tensor of a copy among `names` of `tensors`."""
        shared, owners = self._model.config.shared, {}
        for name in names if shared else ():
            prefix = next(prefix for prefix in (PARAMETERS, MOMENTS, AVERAGES) if name.startswith(prefix))
            parameter = name.removeprefix(prefix)
            if prefix == MOMENTS:
                moment, _, parameter = parameter.partition(".")
                prefix += f"{moment}."
            if parameter in shared:
                owners[name] = f"{prefix}{shared[parameter]}"
        return owners

    def saved(self) -> dict[str, Tensor]:
        """Return `tensors` without those of copies, which are equal to their owners'."""
        tensors = self.tensors()
        copies = self.owners(tensors)
        return {name: tensor for name, tensor in tensors.items() if name not in copies}

    @property
    def loss_scale(self) -> Scale | None:
        """State of the loss scale; None if the loss is not scaled."""
        return Scale(**self._scaler.state()) if self._scaler else None

    def load(self, checkpoint: Checkpoint, changed: Collection[str] = ()) -> None:
        """Restore the state in `checkpoint`. Collective. Raises CheckpointError.

        changed: settings that differ from those of the checkpoint, and may. An optimizer that needs state that the
        checkpoint lacks starts afresh, as do parameters that were frozen; averages that it lacks start as the
        parameters.
        """
        there = checkpoint.index.tensors
        if any(name.startswith(MOMENTS) for name in there):  # else the checkpoint is from before the first step
            self._optimizer.allocate()
        wanted = self.tensors()
        owners = self.owners(wanted)
        if {"train.freeze", "lora.train"} & {*changed}:  # parameters that were frozen have no state there
            self._optimizer.forget(lambda name: owners.get(f"{MOMENTS}{name}", f"{MOMENTS}{name}") not in there)
            wanted = self.tensors()
        other = any(key.startswith("optimizer.") for key in changed)
        if other and any(owners.get(name, name) not in there for name in wanted if name.startswith(MOMENTS)):
            self._optimizer.forget()
            wanted = self.tensors()
        no_averages = not any(name.startswith(AVERAGES) for name in there)
        if no_averages and "train.ema_decay" in changed:
            wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith(AVERAGES)}
        load_tensors(checkpoint.path, wanted, checkpoint.index, owners)
        if self._ema and no_averages:
            self._ema.restart()
        self._model.parameters_changed()
        if self._scaler and checkpoint.facts.loss_scale:
            self._scaler.load_state(checkpoint.facts.loss_scale.model_dump())


class Saver:
    """Saver of the checkpoints of one run. All ranks have one and call its methods together.

    `save`, `advance` and `finish` are collective, and raise CheckpointError if a checkpoint cannot be written.
    `writer.staged` must be called before the state of the run changes.

    metric: decides which evaluation is the best.
    interval: steps between checkpoints; 0 for none by step. last: last step of the run.
    texts: returns the text files of a checkpoint for a step, its samples and the best evaluation.
    log, warn: called with messages on what was saved, and what was not copied to object storage.
    saved: called with the step of a checkpoint that is being saved.
    beat: called before each wait for a disk.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: TrainingState,
        settings: CheckpointSection,
        *,
        metric: Metric,
        interval: int,
        last: int,
        texts: Callable[[int, int, BestEvaluation | None], dict[str, str]],
        log: Callable[[str], None],
        saved: Callable[[int], None],
        warn: Callable[[str], None] = lambda text: None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.checkpoints, self._state, self._settings = checkpoints, state, settings
        self._interval, self._last, self._texts, self._log, self._beat = interval, last, texts, log, beat
        self._metric, self.writer, self._warn, self._tell_saved = metric, Writer(), warn, saved
        self._copy = parse_place(settings.copy_to) if settings.copy_to else None
        self._not_copied: str | None = None
        self._best: BestEvaluation | None = None
        self._earlier: set[int] = set()
        self._saved: set[int] = set()
        self._since = time.monotonic()

    @property
    def minutes(self) -> float:
        """Minutes since the last checkpoint, or since the start."""
        return (time.monotonic() - self._since) / 60

    def resume(self, checkpoint: Checkpoint) -> None:
        """Resume from `checkpoint`.

        Later checkpoints belong to an abandoned course of the run. They stay until this one has saved a checkpoint.
        """
        self._best = checkpoint.facts.best
        self._earlier = {step for step in self.checkpoints.steps() if step <= checkpoint.facts.step}

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`, by the number of the step alone."""
        if self._settings.never:
            return False
        by_step = self._interval and step % self._interval == 0
        return bool(by_step or step == self._last or (self._settings.first and step == 1))

    def late(self, minutes: float) -> bool:
        """Return whether a checkpoint is due by time. minutes: since the last one, equal on all ranks."""
        every = self._settings.every
        return every.unit == "minutes" and 0 < every.number <= minutes

    def best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation. Return whether it is the best so far, so that a checkpoint is to be kept."""
        name, value, best = self._metric.name, metrics[self._metric.name], self._best
        if not self._settings.keep_best:
            return False
        if best is not None and best.metric == name and not self._metric.is_better(value, best.value):
            return False
        self._best = BestEvaluation(step=step, metric=name, value=value)
        return True

    def save(self, step: int, samples: int) -> None:
        """Save the run after `step`, and then remove the checkpoints that are not kept.

        Does nothing if the step is saved already or the recipe wants no checkpoints. Training continues meanwhile if
        the recipe says so.
        """
        if self._settings.never or step in self._saved:
            return
        begun = time.monotonic()
        self.finish()
        self._beat()
        self._since = time.monotonic()
        self._saved.add(step)
        kept = self._settings.kept(sorted(self._earlier | self._saved), self._best.step if self._best else None)
        files = self._texts(step, samples, self._best)
        self.writer.begin(self.checkpoints.path(step), self._state.saved(), files, partial(self._published, step, kept))
        if not self._settings.asynchronous:
            self.finish()
        self._log(f"saving step {step:,}: training waited {time.monotonic() - begun:.3f} s")
        self._tell_saved(step)

    def advance(self, worst: float) -> None:
        """Advance the checkpoint that is being written. worst: the largest `progress` of all ranks."""
        self._tell(self.writer.advance(worst))

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        self._beat()
        self._tell(self.writer.finish())

    def _published(self, step: int, kept: set[int]) -> None:
        """Copy a checkpoint that is complete, and remove those that are not kept. Runs in a thread of rank 0."""
        self.checkpoints.keep(kept)
        if isinstance(self._copy, ObjectPath):
            try:
                upload_checkpoint(self.checkpoints.path(step), self._copy, kept)
            except OSError as error:
                self._not_copied = f"step {step:,} was saved but not copied to '{self._copy}': {error.strerror}"

    def _tell(self, saved: Saved | None) -> None:
        if self._not_copied:
            self._warn(self._not_copied)
            self._not_copied = None
        if saved:
            self._log(f"{saved.folder.name} was complete after {saved.seconds:.2f} s, {saved.bytes / 1e6:,.1f} MB")
