"""Losses and hits of token logits, which may be split by vocabulary over tensor-parallel ranks.

Logits are the largest tensor of many models of text: a BERT-base gives 30,522 numbers for each token, 40 times its
width. They are never gathered, and never complete in float32: exponentials are computed in chunks of tokens, once in
forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitpar.models.bases import LOSS_CHUNK
from vitpar.models.compiled import wide
from vitpar.models.config import IGNORED
from vitpar.parallel.collective import all_gather, all_reduce


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's part of the vocabulary."""

    start: int
    """First id of the part."""
    group: dist.ProcessGroup
    """Ranks that hold the other parts of the same logits."""


def token_losses(logits: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """Return the cross-entropy of each token, of the shape of `targets`, float32 or float64; 0 where IGNORED.

    Collective over the ranks of `part.group`, which get equal losses; each gets the gradient of its own logits.

    logits: [batch, tokens, vocabulary], or this rank's part of the vocabulary, in any floating-point type.
    targets: int64 [batch, tokens].
    part: None for complete logits.
    """
    losses: Tensor = _TokenLosses.apply(logits.flatten(0, -2), targets.flatten(), part)
    return losses.view_as(targets)


def first_hits(logits: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """Return for each token whether its target has the largest logit, bool of the shape of `targets`.

    Of equal logits the first counts, under every plan. Collective, and parameters are those of `token_losses`.
    """
    if part is None:
        return logits.argmax(-1) == targets
    largest, ids = logits.max(-1)
    largest = largest.to(wide(logits))
    best = all_reduce(largest, part.group, "max")
    ids = torch.where(largest == best, ids + part.start, torch.iinfo(ids.dtype).max)
    return all_reduce(ids, part.group, "min") == targets


def complete_logits(logits: Tensor, vocabulary: int, part: VocabularyPart) -> Tensor:
    """Return the logits of all ids, for predictions. Collective over the ranks of `part.group`.

    vocabulary: number of ids. Only the last parts may be shorter than the first, as torch.chunk splits.
    """
    longest = -(-vocabulary // part.group.size())
    padded = F.pad(logits, (0, longest - logits.shape[-1]))
    return all_gather(padded, padded.dim() - 1, part.group)[..., :vocabulary]


class _TokenLosses(torch.autograd.Function):
    """Cross-entropy of rows of logits.

    logits [rows, ids], targets [rows]. Backward needs the logits and one number per row.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, part: VocabularyPart | None) -> Tensor:
        ids = targets - (part.start if part else 0)
        # IGNORED is negative: on no rank.
        inside = (ids >= 0) & (ids < logits.shape[1])
        ids = ids.masked_fill(~inside, 0)
        largest = logits.amax(1).to(wide(logits))
        if part:
            largest = all_reduce(largest, part.group, "max")
        sums = largest.new_empty(2, len(largest))
        for rows in _chunks(logits):
            # Of a 16-bit and a wide tensor the difference is wide, without a wide copy of the logits.
            sums[0, rows] = (logits[rows] - largest[rows, None]).exp_().sum(1)
        sums[1] = (logits.gather(1, ids[:, None])[:, 0] - largest).masked_fill(~inside, 0.0)
        if part:
            sums = all_reduce(sums, part.group)
        logarithm, counted = sums[0].log(), targets != IGNORED
        ctx.save_for_backward(logits, largest + logarithm, ids, inside, counted)
        return (logarithm - sums[1]).masked_fill(~counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, normaliser, ids, inside, counted = ctx.saved_tensors
        gradient = gradient.masked_fill(~counted, 0.0)[:, None]
        result = torch.empty_like(logits)
        for rows in _chunks(logits):
            probabilities = (logits[rows] - normaliser[rows, None]).exp_()
            # Before rounding to 16 bits: of a probability close to 1 little remains.
            probabilities.scatter_add_(1, ids[rows, None], -inside[rows, None].to(probabilities.dtype))
            torch.mul(probabilities, gradient[rows], out=result[rows])
            del probabilities  # before the next chunk's are made
        return result, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of rows with at most LOSS_CHUNK logits, or of one row."""
    rows = max(1, LOSS_CHUNK // logits.shape[1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)
