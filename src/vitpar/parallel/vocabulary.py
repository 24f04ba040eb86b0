"""Losses and hits of token logits, which may be split by vocabulary over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitpar.models.config import IGNORED


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's part of the vocabulary."""

    start: int
    """First id of the part."""
    group: dist.ProcessGroup
    """Ranks that hold the other parts of the same logits."""


def token_losses(logits: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """Return the cross-entropy of each token, of the shape of `targets`, float32 or float64; 0 where IGNORED.

    logits: [batch, tokens, vocabulary], or this rank's part of the vocabulary.
    targets: int64 [batch, tokens].
    part: None for complete logits.
    """
    assert part is None, "logits are complete"
    wide = logits if logits.dtype.itemsize == 8 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none").view_as(
        targets
    )


def first_hits(logits: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """Return for each token whether its target has the largest logit, bool of the shape of `targets`.

    Parameters are those of `token_losses`.
    """
    assert part is None, "logits are complete"
    return logits.argmax(-1) == targets
