"""Cross-entropy of scores with the probabilities of a teacher, and KoLeo: the losses of DINOv2 (arXiv 2304.07193)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitpar.models.bases import LOSS_CHUNK
from vitpar.parallel.collective import all_reduce
from vitpar.parallel.vocabulary import VocabularyPart

KOLEO_EPS = 1e-8
"""Number that keeps distances of KoLeo above 0, as in DINOv2."""


def log_sums(scores: Tensor, part: VocabularyPart | None) -> Tensor:
    """Return the logarithm of the sum of exponentials of complete rows, [..., 1]. Collective over `part.group`.

    scores: [..., this rank's prototypes], float32 or float64.
    """
    largest = scores.amax(-1, keepdim=True)
    if part:
        largest = all_reduce(largest, part.group, "max")
    sums = (scores - largest).exp().sum(-1, keepdim=True)
    if part:
        sums = all_reduce(sums, part.group)
    return sums.log() + largest


def soft_cross_entropy(
    scores: Tensor, targets: Tensor, weights: Tensor, temperature: float, prototypes: int, part: VocabularyPart | None
) -> Tensor:
    """Return the weighted sum of the cross-entropies of rows of scores with probabilities of the teacher, 0-dim.

    The first two rows of a sample, those of its global crops, learn from each other's target; further rows before the
    patches, those of local crops, from both; and patches from the target of the same patch.

    scores: [samples, rows, this rank's prototypes], in any floating-point type.
    targets: scores of the teacher over its temperature, [samples, 2 + patches, this rank's prototypes]; NaN for patches
        that do not count.
    weights: weight of each row, [samples, rows]; 0 for patches that do not count.
    temperature: that the scores are divided by.
    prototypes: complete number.
    """
    loss: Tensor = _SoftCrossEntropy.apply(scores, targets, weights, temperature, prototypes, part)
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    """The gradient is computed in forward, where the probabilities are, and kept in the type of the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        targets: Tensor,
        weights: Tensor,
        temperature: float,
        prototypes: int,
        part: VocabularyPart | None,
    ) -> Tensor:
        wide = torch.float64 if scores.dtype is torch.float64 else torch.float32
        gradient, total = torch.empty_like(scores), weights.new_zeros(())
        classes = scores.shape[1] - targets.shape[1] + 2
        # Equal on all ranks of the group, which exchange numbers in each chunk.
        at_once = max(1, LOSS_CHUNK // (scores.shape[1] * prototypes))
        for start in range(0, len(scores), at_once):
            here = slice(start, start + at_once)
            wanted = targets[here].to(wide).nan_to_num(0.0)
            wanted = (wanted - log_sums(wanted, part)).exp_()
            both, one = wanted[:, :2].sum(1, keepdim=True), wanted[:, :2].flip(1)
            wanted = torch.cat([one, both.expand(-1, classes - 2, -1), wanted[:, 2:]], dim=1)
            mass = torch.ones_like(weights[here, :, None])
            mass[:, 2:classes] = 2.0
            mine = scores[here].to(wide) / temperature
            logarithms = log_sums(mine, part)
            products = (wanted * mine).sum(-1, keepdim=True)
            if part:
                products = all_reduce(products, part.group)
            weight = weights[here, :, None]
            total += (weight * (mass * logarithms - products)).sum()
            mine = (mine - logarithms).exp_().mul_(mass).sub_(wanted).mul_(weight / temperature)
            gradient[here] = mine
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return own * gradient.to(own.dtype), None, None, None, None, None


def koleo(features: Tensor, group: int) -> Tensor:
    """Return the sum over samples of -log of the distance to the nearest other sample of the group, 0-dim.

    features: [samples, features]; they are divided by their lengths.
    group: samples of a group, which divides all.

    Source: the differential entropy estimator of Kozachenko and Leonenko (arXiv 1806.03198).
    """
    x = F.normalize(features, dim=-1, eps=KOLEO_EPS).unflatten(0, (-1, group))
    with torch.no_grad():
        alike = x @ x.mT
        alike.diagonal(dim1=1, dim2=2).fill_(-1.0)
        nearest = alike.argmax(-1)
    others = x.gather(1, nearest[..., None].expand_as(x))
    return -((x - others + KOLEO_EPS).norm(dim=-1) + KOLEO_EPS).log().sum()
