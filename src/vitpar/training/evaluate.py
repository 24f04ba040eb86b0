"""Evaluation on a complete data set: exact under any plan, also if the last batch is not full."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.data.loader import Skipped
from vitpar.data.stream.stream_set import ImageSet, StreamSet
from vitpar.errors import DataError
from vitpar.launch.world_group import all_reduce_
from vitpar.models import IGNORED
from vitpar.parallel import ParallelModel
from vitpar.tasks import Task
from vitpar.tasks.input import Input
from vitpar.text import count


@dataclass(frozen=True)
class Predictions:
    """Predictions for some images of a set. Images that cannot be read are left out."""

    samples: Tensor
    """Number of each image in the set, int64 [images]."""
    labels: Tensor
    """Label of each image, int64 [images]."""
    values: Mapping[str, Tensor]
    """Answers of the model by name, [images] or [images, k] (``Task.predict``)."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    samples: int
    """Images evaluated."""
    metrics: Mapping[str, float]
    """The loss, and the metrics of the task, by name."""
    skipped: Skipped
    """Bad images and shards, which are not counted in `samples`."""
    promised: int | None = None
    """Images that the recipe says a stream has; None for packed data."""

    @property
    def figures(self) -> dict[str, float]:
        """Numbers of the result, by name."""
        return {"samples": self.samples, **self.metrics}

    @property
    def warning(self) -> str | None:
        """Warning about images that were skipped, or that a stream lacked or had in excess; None if there is none."""
        times, shards = self.skipped.times, self.skipped.shards
        words = [count(times, "image")] * bool(times) + [count(shards, "shard")] * bool(shards)
        warnings = [f"{' and '.join(words)} skipped: {'; '.join(self.skipped.problems)}"] * bool(words)
        if self.promised is not None and self.promised != self.samples + times:
            warnings.append(
                f"the stream had {self.samples + times} images instead of the {self.promised} in the recipe"
            )
        return "; ".join(warnings) or None


@torch.no_grad()
def evaluate(
    model: ParallelModel,
    source: Input,
    images: ImageSet,
    progress: Callable[[int], None] = lambda images: None,
    predicted: Callable[[Predictions], None] | None = None,
) -> Evaluation:
    """Evaluate `model` on all of `images`. Collective; equal results on every rank.

    source: for the task of the labels of `images`.
    progress: called before every batch and after the last, with the number of images evaluated so far.
    predicted: called on rank 0 with the predictions of each batch, in order. Give it on all ranks, or on none, and
    not for a stream, whose images have no numbers.

    Raises DataError if bad samples are skipped and all of them are bad.
    """
    assert predicted is None or not isinstance(images, StreamSet), "images of a stream have no numbers"
    task = source.task
    sums = torch.zeros_like(task.sums(*task.trial())).to(model.device)
    samples = torch.zeros((), dtype=torch.int64, device=model.device)
    rows = torch.tensor(model.output_rows(model.batch_size), device=model.device)
    loader = source.eval_batches(images)
    with closing(iter(loader)) as batches:
        progress(0)
        for number, batch in enumerate(batches, start=1):
            if (taken := source.eval_step(batch)) is None:
                break
            given, labels = taken
            samples += (labels != IGNORED).sum()
            outputs = model.predict(given.images, len(labels), **given.sides)
            mine = None
            if model.first_of_outputs or model.vocabulary is not None:
                assert outputs is not None
                # Outputs of tokens are large: their task converts them in parts.
                mine = outputs if outputs.ndim > 2 else outputs.double()
                targets = given.targets if task.LOCAL_TARGETS else given.targets[rows]
                part = () if model.vocabulary is None else (model.vocabulary,)
                # All ranks that have a part of the vocabulary compute the sums together, and only one counts.
                here = task.sums(mine, targets, *part)
                sums += here if model.first_of_outputs else 0
                complete = mine if predicted is None else model.complete(mine)
                mine = complete if model.first_of_outputs else None
            if predicted is not None:
                first = (number - 1) * model.batch_size
                predictions = _predictions(task, mine, rows, labels, first)
                if dist.get_rank() == 0:
                    predicted(predictions)
            progress(min(number * model.batch_size, len(images)))
    model.parameters_changed()
    all_reduce_(sums)
    if not samples:
        raise DataError(f"none of the {len(images)} images of '{images.place}' could be read: pack the data set again")
    promised = len(images) if isinstance(images, StreamSet) else None
    return Evaluation(int(samples), task.result(sums), source.skipped(loader), promised)


def _predictions(task: Task, outputs: Tensor | None, rows: Tensor, labels: Tensor, first: int) -> Predictions:
    """Return the predictions for one global batch, on the CPU of every rank. Collective.

    outputs: [rows, outputs], float64, on the first rank of those that have the same rows; None on others.
    rows: indices of this rank's rows in the batch.
    labels: of the batch.
    first: number of the batch's first image in the set.
    """
    shapes = task.predict(task.trial()[0])
    widths = [value[0].numel() for value in shapes.values()]
    # Exactly one rank fills each row, so the sum over the ranks is exact.
    table = torch.zeros(len(labels), sum(widths), dtype=torch.float64, device=labels.device)
    if outputs is not None:
        table[rows] = torch.cat([value.double().view(len(rows), -1) for value in task.predict(outputs).values()], dim=1)
    all_reduce_(table)
    kept = (labels != IGNORED).nonzero().flatten()
    columns = table[kept].cpu().split(widths, dim=1)
    values = {
        name: column.to(like.dtype).view(len(kept), *like.shape[1:])
        for column, (name, like) in zip(columns, shapes.items(), strict=True)
    }
    return Predictions(kept.cpu() + first, labels[kept].cpu(), values)
