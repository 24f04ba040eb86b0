"""Common parts of the layers of models of text: dropout, attention, and what is added to its scores."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitpar.models.description import AttentionShape
from vitpar.models.keyed_random import at_place, drop
from vitpar.models.layers import Layer, StackedLinear

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


class SelfAttention(nn.Module):
    """Multi-head self-attention.

    The rows of `qkv` are ordered (head, q|k|v, feature), so that a slice of rows is whole heads.

    config: with `embed_dim`, `num_heads` and `head_dim`.
    """

    TENSOR_PARALLEL: ClassVar[dict[str, str]] = {"qkv": "column", "proj": "row"}
    scale: float | None = None
    """Factor of the scores; None for 1 / √head_dim."""

    def __init__(self, config: Any, *, bias: bool = True, biased: bool = False) -> None:
        super().__init__()
        self.head_dim, heads = config.head_dim, config.num_heads
        self.qkv = StackedLinear(config.embed_dim, 3 * heads * self.head_dim, (self.head_dim,) * 3, bias=bias)
        self.proj = nn.Linear(heads * self.head_dim, config.embed_dim, bias=bias)
        self.divisible = {"head": heads}
        self.attention_shape = AttentionShape(0, heads, self.head_dim, biased=biased)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: [batch, tokens, width] -> the same shape. mask: of all samples that `qkv` gives, [batch, tokens]."""
        q, k, v = rearrange(self.qkv(x), "b s (h three d) -> three b h s d", three=3, d=self.head_dim).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=self.added_to_scores(q, mask), scale=self.scale)
        return self.proj(rearrange(x, "b h s d -> b s (h d)"))

    def added_to_scores(self, q: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return what is added to the scores, which broadcasts to [batch, heads, tokens, tokens]; None for nothing."""
        return padding_scores(mask, q.dtype)
