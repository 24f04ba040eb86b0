"""Common parts of the layers of models of text: dropout, and what is added to the scores of attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitpar.models.keyed_random import at_place, drop
from vitpar.models.layers import Layer

USES = 4
"""Places of dropout in a layer, at most."""


class TextLayer(Layer):
    """Base of layers with dropout at up to four places.

    index: number of the layer in the model.
    dropout: rate at each place.
    """

    place: Tensor

    def __init__(self, index: int, dropout: float) -> None:
        super().__init__()
        self.index, self.dropout = index, dropout
        # A tensor, since the compiler would make a graph for every value of a number: one graph serves all blocks.
        self.register_buffer("place", torch.empty((), dtype=torch.int64), persistent=False)

    def reset_buffers(self) -> None:
        self.place.fill_(USES * self.index)

    def dropped(self, x: Tensor, keys: Tensor | None, use: int) -> Tensor:
        """Return `x` with dropout in training. keys: int64 [batch] or None (nothing is dropped). use: from 0 to 3."""
        if keys is None or not self.training or not self.dropout:
            return x
        return drop(x, at_place(keys, self.place + use), self.dropout, whole_sample=False)


def embedded(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows `ids` of `weight`, whose gradient is accurate in 16 bits, on CPUs too.

    upstream: on CPUs, torch's backward of ``embedding`` adds up the gradients of an id in 16 bits, token after token.
    With 4,096 tokens of one id, bfloat16 loses half of the sum.
    """
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float16):
        return F.embedding(ids, weight)
    return F.embedding(ids, weight.float()).to(weight.dtype)


class Embedding(nn.Embedding):
    """Embedding that gets an accurate gradient in 16 bits (`embedded`)."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 [batch, tokens] -> [batch, tokens, width]."""
        return embedded(ids, self.weight)


class TokenLogits(nn.Linear):
    """Linear layer from tokens to logits.

    upstream: ``linear`` with a bias gives a view for three dimensions, of which FSDP2 warns.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> [batch, tokens, vocabulary]."""
        logits = super().forward(x.flatten(0, 1))
        # As a view, but independent of `logits`, which nothing else holds.
        whole: Tensor = torch.ops.aten._unsafe_view(logits, [*x.shape[:2], logits.shape[1]])
        return whole


def masked(dtype: torch.dtype) -> float:
    """Return the number that is added to the scores of tokens that must not be attended to.

    Its exponential is 0. Two of them can be added, and kernels can multiply the sum by log2(e): a row of scores without
    any other token stays finite in every type.
    """
    return torch.finfo(dtype).min / 4


def padding_scores(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to the scores: `masked` for keys that are padding, else 0; [batch, 1, 1, tokens].

    mask: int or bool [batch, tokens], not 0 for tokens to attend to; None for no padding.
    """
    if mask is None:
        return None
    zeros = torch.zeros((), dtype=dtype, device=mask.device)
    return zeros.where(mask != 0, masked(dtype))[:, None, None, :]
