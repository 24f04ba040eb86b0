"""The contract of a task: targets, loss, metrics and predictions.

A task is a frozen dataclass, equal on all ranks. Its fields beside `labels` are options, which recipes set in
``task.options``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from vitpar.errors import RecipeError
from vitpar.models.config import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

    from vitpar.data.classes import ClassMatch
    from vitpar.data.stream.stream_set import ImageSet
    from vitpar.models.config import ModelConfig
    from vitpar.recipe.rates.shapes import RunLengths
    from vitpar.strategy import Plan


_LONGEST = 60
"""Most characters of the name of a metric that is read from a file."""


@dataclass(frozen=True)
class Metric:
    """A number that an evaluation reports."""

    name: str
    """Key in metrics.jsonl."""
    title: str = ""
    """Name in tables and charts; that of the key if empty."""
    share: bool = False
    """Whether it is from 0 to 1 and shown in percent."""
    higher: bool = True
    """Whether a larger number is better."""

    @property
    def words(self) -> str:
        """Name for people."""
        return self.title or self.name

    @classmethod
    def read(cls, said: object) -> Metric | None:
        """Return the metric that a file describes by the fields of this class; None for anything else."""
        if not isinstance(said, dict):
            return None
        name, title = said.get("name"), said.get("title", "")
        if not isinstance(name, str) or not isinstance(title, str) or not 0 < len(name) <= _LONGEST >= len(title):
            return None
        return cls(name, title, said.get("share") is True, said.get("higher") is True)

    def is_better(self, value: float, than: float) -> bool:
        """Return whether `value` is better than another."""
        return value > than if self.higher else value < than

    def shown(self, value: float | None, brief: bool = False) -> str:
        """Return a value as text: 91.23% (`brief`: 91.2 %) or 0.1234; a dash for None."""
        if value is None:
            return "–"
        if not self.share:
            return f"{value:.4g}"
        return f"{value * 100:.1f} %" if brief else f"{value:.2%}"


LOSS = Metric("loss", higher=False)
"""The mean loss, which every evaluation reports."""


@dataclass(frozen=True)
class LabelSet:
    """LabelSet of a data set: numbers from 0, which may have names."""

    count: int
    """Number of different labels."""
    names: tuple[str, ...] | None = None
    """Their names, by number; None if they have none."""

    @classmethod
    def of(cls, data: ImageSet) -> LabelSet:
        """Return the labels of a data set."""
        return cls(data.num_classes, next(iter(data.names_of_classes), None))


class StepInput(NamedTuple):
    """Input of a step on one rank, as ``ParallelModel.forward_backward`` takes it."""

    images: Tensor | None
    """This rank's images; None where the model takes none."""
    targets: Tensor
    """Targets of the complete batch; of this rank's outputs under ``Task.LOCAL_TARGETS``."""
    keys: Tensor | None = None
    """Random keys of the complete batch; None for a model without random numbers."""
    sides: Mapping[str, Tensor] = {}
    """Further inputs of the complete batch by name (``ModelConfig.side_inputs``)."""
    taught: Tensor | None = None
    """This rank's images of the teacher; None without one."""


@dataclass(frozen=True)
class Task:
    """Base of tasks: labelled images, and a loss that is a mean over samples.

    Subclasses define `outputs` and `losses`, and `reference` so that `vitpar check` can compare with another formula.
    """

    NAME: ClassVar[str] = ""
    """Name in recipes."""
    INPUT: ClassVar[Literal["images", "text"]] = "images"
    """Kind of data."""
    SAMPLE: ClassVar[str] = "image"
    """Word for a sample, for messages."""
    OUTPUT: ClassVar[str] = "output"
    """Word for one output of the model, for messages."""
    METRICS: ClassVar[tuple[Metric, ...]] = ()
    """Metrics besides the loss. The first decides which checkpoint is the best; without any, the loss does."""
    TRAINING_METRICS: ClassVar[tuple[Metric, ...]] = ()
    """Metrics of training steps besides the loss, which `measure` returns."""
    PREDICTS: ClassVar[bool] = True
    """Whether `predict` says something about each sample."""
    AVERAGES: ClassVar[bool] = False
    """Whether the average of the parameters is the teacher (`teacher_config`), so that a training needs one. It reads
    no streams, and evaluates what the teacher makes of labelled images, if there are any, in place of the outputs."""
    IMAGE_TARGETS: ClassVar[bool] = False
    """Whether `local_targets` makes targets of images and keys, under LOCAL_TARGETS."""
    PICTURES: ClassVar[str] = ""
    """Sentence on what `pictures` shows, for `vitpar report --images`; empty if it shows nothing."""
    MIXES: ClassVar[bool] = False
    """Whether images may be mixed (mixup, CutMix), which gives targets of `vitpar.data.transforms.batch.Mixed`."""
    FAMILIES: ClassVar[tuple[str, ...]] = ()
    """Families of models that only this task trains; without any, those that no other task names."""
    LOCAL_TARGETS: ClassVar[bool] = False
    """Whether a rank has the targets of its own outputs only, not those of the complete batch."""
    OUTPUTS_ARE_LABELS: ClassVar[bool] = False
    """Whether the model has an output for each label, so that weights and data are matched by the labels' names."""

    labels: LabelSet = field(default_factory=lambda: LabelSet(1))
    """LabelSet of the data."""

    @property
    def best(self) -> Metric:
        """The metric that decides which checkpoint is the best."""
        return self.METRICS[0] if self.METRICS else LOSS

    @property
    def outputs(self) -> int:
        """Number of outputs of the model, its `num_classes`."""
        raise NotImplementedError

    def words(self, row: Mapping[str, float], brief: bool = False) -> str:
        """Return the loss and the first two metrics of an evaluation as text. brief: as for `Metric.shown`."""
        shown = (f"{metric.words} {metric.shown(row[metric.name], brief)}" for metric in self.METRICS[:2])
        return "  ".join((f"loss {row[LOSS.name]:.4f}", *shown))

    def training_words(self, row: Mapping[str, Any], brief: bool = False) -> str:
        """Return the metrics of a training step as text; empty if its row has none. brief: as for `Metric.shown`."""
        there = [metric for metric in self.TRAINING_METRICS if metric.name in row]
        return "  ".join(f"{metric.words} {metric.shown(row[metric.name], brief)}" for metric in there)

    @property
    def model_options(self) -> Mapping[str, Any]:
        """Fields of the model that follow from the data unless the recipe sets them, besides `outputs`."""
        return {}

    def filling(self, config: ModelConfig) -> Self:
        """Return the task with samples as large as `config` takes, for use without data."""
        return self

    def refuse_model(self, config: ModelConfig) -> None:
        """Raise RecipeError for a model that does not fit the task or the data."""
        if config.input.dtype is not None:
            raise RecipeError(
                f"task '{self.NAME}' reads images, but {config.name} takes text: name a model of images, or a task of "
                "text, such as --task mlm"
            )

    @property
    def sample_group(self) -> int:
        """Number that has to divide the samples of a micro-batch of which a rank gives the outputs."""
        return 1

    def refuse_plan(self, config: ModelConfig, plan: Plan, batch_size: int) -> None:
        """Raise RecipeError for a validated plan under which a rank lacks samples that the loss compares."""

    @classmethod
    def model_for(cls, config: ModelConfig) -> ModelConfig | None:
        """Return the model with which this task continues the training of a model; None if that is the same model."""
        return None

    @property
    def unchecked(self) -> str:
        """Sentence on why `vitpar check` cannot compare the task; empty if it can."""
        return ""

    def teacher_config(self, config: ModelConfig) -> ModelConfig | None:
        """Return the model of the teacher that is the average of the model `config`; None for a task without one.

        It has the same parameters. Its outputs give the targets.
        """
        return None

    def sides(self, keys: Tensor, rows: Collection[int], config: ModelConfig) -> Mapping[str, Tensor]:
        """Return the side inputs of the model that follow from the keys of a batch, by name, [batch, …] on the CPU.

        keys: int64 [batch], on the CPU. rows: samples that are needed.
        """
        return {}

    def schedules(self, run: RunLengths) -> Mapping[str, Callable[[int], float]]:
        """Return functions of the number of an update, from 1, by the name of what changes over a run.

        `teacher_temp` is the temperature of the teacher; `rate_PART` the factor of the learning rate of a part of the
        model (``ModelConfig.rate_part``).
        """
        return {}

    def reference_taught(self, outputs: Tensor, taught: Tensor, sides: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of each sample by a formula of its own, [batch], with a teacher of `teacher_config`.

        taught: outputs of the teacher for the same samples.
        """
        raise NotImplementedError

    def targets(self, labels: Tensor) -> Tensor:
        """Return the targets of samples, [batch] or [batch, …], on the device of `labels`.

        labels: int64 [batch], numbers of `Task.labels`. Called once per batch.
        """
        return labels

    def local_targets(self, images: Tensor, keys: Tensor, config: ModelConfig) -> Tensor:
        """Return the targets of samples, [samples, …], of the type of `images`, under LOCAL_TARGETS.

        images: [samples, channels, size, size], normalised, float32 or float64.
        keys: int64 [samples], random keys of the samples; 0 in evaluation.
        config: the model.
        """
        raise NotImplementedError

    def reference_targets(self, images: Tensor, keys: Tensor, config: ModelConfig) -> Tensor:
        """Return what `local_targets` returns by a formula of its own, for `vitpar check`."""
        return self.local_targets(images, keys, config)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, [batch]. outputs: [batch, outputs], float32 or float64."""
        raise NotImplementedError

    def figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return the value of each of METRICS for each sample, [batch], whose means an evaluation reports."""
        return {}

    def reference(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what `losses` returns by a formula of its own, for `vitpar check`."""
        raise NotImplementedError

    def reference_mixed(self, outputs: Tensor, first: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        """Return `reference` for mixed images: `weight` of the targets `first`, and the rest of `other`."""
        return weight * self.reference(outputs, first) + (1 - weight) * self.reference(outputs, other)

    def predict(self, outputs: Tensor) -> Mapping[str, Tensor]:
        """Return what the model says about each sample by name, [batch] or [batch, k] each."""
        return {"prediction": outputs[:, 0] if outputs.shape[1] == 1 else outputs}

    def pictures(self, outputs: Tensor, images: Tensor, keys: Tensor, config: ModelConfig) -> Mapping[str, Tensor]:
        """Return pictures of each sample besides the image by name, shaped and normalised as `images`, under PICTURES.

        outputs: [samples, …], those of the model. images, keys, config: as for `local_targets`.

        Pixels without a value are NaN.
        """
        raise NotImplementedError

    def answers(self, outputs: Tensor, most: int, names: Sequence[str] | None) -> list[list[dict[str, Any]]]:
        """Return what `vitpar predict` prints: for each sample rows of values by column.

        most: number of rows that the user wants, for tasks with several answers.
        names: of the outputs; None if they have none.
        """
        columns = {name: values.tolist() for name, values in self.predict(outputs).items()}
        return [[dict(zip(columns, row, strict=True))] for row in zip(*columns.values(), strict=True)]

    def trial(self) -> tuple[Tensor, Tensor]:
        """Return outputs and targets of one sample, all zero, for the shapes of what the task computes."""
        import torch

        return torch.zeros(1, self.outputs).double(), self.counted_targets(torch.zeros(1, dtype=torch.int64))

    # What follows is derived. The trainer, evaluation, checks and measurements call it.

    def counted_targets(self, labels: Tensor) -> Tensor:
        """Return `targets` with IGNORED, or NaN, where a label is IGNORED."""
        import torch

        known = labels != IGNORED
        targets = self.targets(labels.clamp(min=0))
        ignored = float("nan") if targets.is_floating_point() else IGNORED
        known = known.view(-1, *(1,) * (targets.ndim - 1))
        return torch.where(known, targets, torch.full_like(targets, ignored))

    def count(self, targets: Tensor, batch: int) -> int | Tensor:
        """Return the number that the loss of a step is divided by.

        targets: those of the complete batch; this rank's under LOCAL_TARGETS.
        batch: samples of the complete batch.
        """
        return batch

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of all samples that are not IGNORED, 0-dim."""
        usable, targets = _usable(targets)
        return self.losses(outputs, targets).where(usable, 0.0).sum()

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return the number of samples that TRAINING_METRICS count, then the sum of each; None for none."""
        return None

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return sums over samples for `result`, float64: their number, the loss, each of METRICS.

        outputs: [samples, outputs], float64.
        """
        import torch

        usable, targets = _usable(targets)
        figures = self.figures(outputs, targets)
        values = [self.losses(outputs, targets), *(figures[metric.name] for metric in self.METRICS)]
        summed = [value.double().where(usable, 0.0).sum() for value in values]
        return torch.stack([usable.sum().double(), *summed])

    def result(self, sums: Tensor) -> dict[str, float]:
        """Return the metrics from the sums over all samples: the loss first, then METRICS."""
        number, *totals = sums.tolist()
        names = (LOSS.name, *(metric.name for metric in self.METRICS))
        return {name: total / number for name, total in zip(names, totals, strict=True)}

    def match(self, names: Sequence[str] | None, data: ImageSet) -> ClassMatch:
        """Return how the outputs of a model relate to the labels of data (``vitpar.data.classes``).

        names: of the outputs; None if they have none.
        """
        from vitpar.data.classes import ClassMatch, match_classes

        return match_classes(names, data) if self.OUTPUTS_ARE_LABELS else ClassMatch("unnamed")


def _usable(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return which samples count, bool [batch], and the targets with 0 for the others."""
    ignored = targets.isnan() if targets.is_floating_point() else targets == IGNORED
    usable = ~ignored.flatten(1).any(1) if targets.ndim > 1 else ~ignored
    return usable, targets.masked_fill(ignored, 0)
