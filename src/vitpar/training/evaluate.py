"""Evaluation on a complete data set: exact under any plan, also if the last batch is not full."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitpar.data import Skipped, StreamSet
from vitpar.errors import DataError
from vitpar.launch.world_group import all_reduce_
from vitpar.models import IGNORED
from vitpar.parallel import ParallelModel
from vitpar.text import count
from vitpar.training.image_data import ImageSet
from vitpar.training.input import Input

TOP = 5
"""Most probable classes that are counted, and that predictions list."""
BINS = 15
"""Bins of equal width for the expected calibration error."""


@dataclass(frozen=True)
class Predictions:
    """Predictions for some images of a set. Images that cannot be read are left out."""

    samples: Tensor
    """Number of each image in the set, int64 [images]."""
    labels: Tensor
    """Class of each image, int64 [images]."""
    classes: Tensor
    """The most probable classes, the most probable first: `TOP`, or all of a model that has less. int64."""
    probabilities: Tensor
    """Probability of each of `classes`, float64."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    samples: int
    """Images evaluated."""
    loss: float
    """Mean cross-entropy, without label smoothing."""
    top1: float
    """Fraction with the correct class first."""
    top5: float
    """Fraction with the correct class among the first 5."""
    ece: float
    """Expected calibration error: mean difference of confidence and accuracy over `BINS` bins of the confidence."""
    skipped: Skipped
    """Bad images and shards, which are not counted in `samples`."""
    promised: int | None = None
    """Images that the recipe says a stream has; None for packed data."""

    @property
    def figures(self) -> dict[str, float]:
        """Numbers of the result, by name."""
        return {
            "samples": self.samples,
            "loss": self.loss,
            "top1": self.top1,
            "top5": self.top5,
            "ece": self.ece,
        }

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

    progress: called before every batch and after the last, with the number of images evaluated so far.
    predicted: called on rank 0 with the predictions of each batch, in order. Give it on all ranks, or on none, and
    not for a stream, whose images have no numbers.

    Raises DataError if bad samples are skipped and all of them are bad.
    """
    assert predicted is None or not isinstance(images, StreamSet), "images of a stream have no numbers"
    sums = torch.zeros(4 + 2 * BINS, dtype=torch.float64, device=model.device)
    rows = torch.tensor(model.logit_rows(model.batch_size), device=model.device)
    loader = source.eval_batches(images)
    with closing(iter(loader)) as batches:
        progress(0)
        for number, batch in enumerate(batches, start=1):
            if (labels := source.evaluated(batch)) is None:
                break
            logits = model.predict(source.images(batch), len(labels))
            mine = None
            if model.first_of_logits:
                assert logits is not None
                mine = logits.double()
                sums += _count(mine, labels[rows])
            if predicted is not None:
                first = (number - 1) * model.batch_size
                predictions = _predictions(mine, rows, labels, min(TOP, model.config.num_classes), first)
                if dist.get_rank() == 0:
                    predicted(predictions)
            progress(min(number * model.batch_size, len(images)))
    model.parameters_changed()
    all_reduce_(sums)
    samples, loss, top1, top5 = sums[:4].tolist()
    if not samples:
        raise DataError(f"none of the {len(images)} images of '{images.place}' could be read: pack the data set again")
    ece = _calibration_error(sums)
    promised = len(images) if isinstance(images, StreamSet) else None
    figures = (int(samples), loss / samples, top1 / samples, top5 / samples, ece)
    return Evaluation(*figures, source.skipped(loader), promised)


def _count(logits: Tensor, labels: Tensor) -> Tensor:
    """Return sums over one batch, float64: [samples, loss, top-1 hits, top-5 hits, …].

    Then follow the summed confidence in each of `BINS` bins of the confidence, and the top-1 hits in each.

    logits: [batch, classes], float64.
    labels: [batch].
    """
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    best = logits.topk(min(TOP, logits.shape[1]), dim=1).indices  # no class is IGNORED (-1), so padding never hits
    hits = (best == labels[:, None]).double()
    usable = (labels != IGNORED).double()
    confidence = logits.softmax(dim=1).amax(dim=1)
    # Bin m has confidences above (m - 1) / BINS, up to m / BINS (Guo et al. 2017, arXiv:1706.04599).
    bins = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    binned = logits.new_zeros(2, BINS).index_add_(1, bins, torch.stack([usable * confidence, hits[:, 0]]))
    return torch.cat([torch.stack([usable.sum(), loss, hits[:, 0].sum(), hits.sum()]), binned.flatten()])


def _calibration_error(sums: Tensor) -> float:
    """Return the expected calibration error from the summed sums of `_count`."""
    samples, (confidence, correct) = sums[0].item(), sums[4:].view(2, BINS)
    return (confidence - correct).abs().sum().item() / samples


def _predictions(logits: Tensor | None, rows: Tensor, labels: Tensor, top: int, first: int) -> Predictions:
    """Return the predictions for one global batch, on the CPU of every rank. Collective.

    logits: [rows, classes], float64, on the first rank of those that have the same rows; None on others.
    rows: indices of this rank's rows in the batch.
    labels: of the batch.
    top: number of most probable classes.
    first: number of the batch's first image in the set.
    """
    # Exactly one rank fills each row, so the sum over the ranks is exact.
    table = torch.zeros(len(labels), 2 * top, dtype=torch.float64, device=labels.device)
    if logits is not None:
        best = logits.topk(top, dim=1).indices
        table[rows] = torch.cat([best.double(), logits.softmax(dim=1).gather(1, best)], dim=1)
    all_reduce_(table)
    kept = (labels != IGNORED).nonzero().flatten()
    kept_rows = table[kept].cpu()
    return Predictions(kept.cpu() + first, labels[kept].cpu(), kept_rows[:, :top].long(), kept_rows[:, top:])
