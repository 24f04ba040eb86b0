"""Evaluation over a whole data set: exact under any plan and with an uneven tail."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitpar.data import ShardSet, Skipped
from vitpar.errors import DataError
from vitpar.models import IGNORED
from vitpar.parallel import ParallelModel
from vitpar.strategy.words import count
from vitpar.train.input import Input


@dataclass(frozen=True)
class Evaluation:
    """Result over `samples` images: mean cross-entropy (no label smoothing) and the fractions right at rank 1 and
    within 5. skipped: bad images that are not among them."""

    samples: int
    loss: float
    top1: float
    top5: float
    skipped: Skipped

    @property
    def figures(self) -> dict[str, float]:
        """What counts, by name."""
        return {"samples": self.samples, "loss": self.loss, "top1": self.top1, "top5": self.top5}

    @property
    def warning(self) -> str | None:
        """What to tell the user about skipped images, if there are any."""
        if not self.skipped.times:
            return None
        return f"{count(self.skipped.times, 'image')} skipped: {'; '.join(self.skipped.problems)}"


@torch.no_grad()
def evaluate(model: ParallelModel, source: Input, shards: ShardSet) -> Evaluation:
    """Run `model` over all of `shards` and count. Collective; equal results on every rank.

    Raises DataError when bad samples are skipped and all of them are bad.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=model.device)  # samples, loss, top-1, top-5
    rows = torch.tensor(model.logit_rows(model.batch_size), device=model.device)
    loader = source.eval_batches(shards)
    for batch in loader:
        labels = source.labels(batch)
        logits = model.predict(source.images(batch), len(labels))
        if model.first_of_logits:
            assert logits is not None
            sums += _count(logits, labels[rows])
    model.parameters_changed()
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    samples, loss, top1, top5 = sums.tolist()
    if not samples:
        raise DataError(f"none of the {len(shards)} images of '{shards.folder}' could be read: pack the data set again")
    return Evaluation(int(samples), loss / samples, top1 / samples, top5 / samples, source.skipped(loader))


def _count(logits: Tensor, labels: Tensor) -> Tensor:
    """[samples, summed loss, top-1 hits, top-5 hits] of one batch, float64.

    logits: [batch, classes], labels: [batch].
    """
    loss = F.cross_entropy(logits.double(), labels, ignore_index=IGNORED, reduction="sum")
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # no label is IGNORED's -1, so padding never hits
    hits = best == labels[:, None]
    return torch.stack([(labels != IGNORED).sum(), loss, hits[:, 0].sum(), hits.sum()]).double()
