"""Evaluation on a complete data set: exact under any plan, also if the last batch is not full."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitpar.data import Skipped, StreamSet
from vitpar.errors import DataError
from vitpar.launch.world_group import all_reduce_
from vitpar.models import IGNORED
from vitpar.parallel import ParallelModel
from vitpar.text import count
from vitpar.training.input import ImageSet, Input


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
    skipped: Skipped
    """Bad images and shards, which are not counted in `samples`."""
    promised: int | None = None
    """Images that the recipe says a stream has; None for packed data."""

    @property
    def figures(self) -> dict[str, float]:
        """Numbers of the result, by name."""
        return {"samples": self.samples, "loss": self.loss, "top1": self.top1, "top5": self.top5}

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
    model: ParallelModel, source: Input, images: ImageSet, progress: Callable[[int], None] = lambda images: None
) -> Evaluation:
    """Evaluate `model` on all of `images`. Collective; equal results on every rank.

    progress: called before every batch and after the last, with the number of images evaluated so far.

    Raises DataError if bad samples are skipped and all of them are bad.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=model.device)  # samples, loss, top-1, top-5
    rows = torch.tensor(model.logit_rows(model.batch_size), device=model.device)
    loader = source.eval_batches(images)
    with closing(iter(loader)) as batches:
        progress(0)
        for number, batch in enumerate(batches, start=1):
            if (labels := source.evaluated(batch)) is None:
                break
            logits = model.predict(source.images(batch), len(labels))
            if model.first_of_logits:
                assert logits is not None
                sums += _count(logits, labels[rows])
            progress(min(number * model.batch_size, len(images)))
    model.parameters_changed()
    all_reduce_(sums)
    samples, loss, top1, top5 = sums.tolist()
    if not samples:
        raise DataError(f"none of the {len(images)} images of '{images.place}' could be read: pack the data set again")
    promised = len(images) if isinstance(images, StreamSet) else None
    return Evaluation(int(samples), loss / samples, top1 / samples, top5 / samples, source.skipped(loader), promised)


def _count(logits: Tensor, labels: Tensor) -> Tensor:
    """Return [samples, summed loss, top-1 hits, top-5 hits] of one batch, float64.

    logits: [batch, classes].
    labels: [batch].
    """
    loss = F.cross_entropy(logits.double(), labels, ignore_index=IGNORED, reduction="sum")
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # no class is IGNORED (-1), so padding never hits
    hits = best == labels[:, None]
    return torch.stack([(labels != IGNORED).sum(), loss, hits[:, 0].sum(), hits.sum()]).double()
