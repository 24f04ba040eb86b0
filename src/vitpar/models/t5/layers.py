"""Layers of T5: embed, blocks of the encoder, the decoder's embedding, blocks of the decoder, head.

From the decoder's embedding on, an activation has the encoder's tokens, which the decoder's blocks only read, and then
the decoder's. Under tensor parallelism a block may compute only some of its heads and hidden features here.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitpar.models.initial import Rules, constant, lecun_normal, normal
from vitpar.models.layers import MLP, Layer, StackedLinear
from vitpar.models.t5.config import T5Config
from vitpar.models.text_layers import Embedding, SelfAttention, TextLayer, TokenLogits, masked, padding_scores


def buckets(tokens: int, number: int, max_distance: int, *, both_ways: bool) -> Tensor:
    """Return the bucket of each relative position, key minus query, from 1 - tokens to tokens - 1: int64.

    Small distances have a bucket each, larger ones share them logarithmically. The arithmetic is transformers', in
    float32, so that no distance falls on the other side of a boundary.

    number: number of buckets.
    both_ways: whether keys after the query have half of the buckets; else they are all in bucket 0.
    """
    relative = torch.arange(1 - tokens, tokens)
    if both_ways:
        number //= 2
        first, distance = (relative > 0).long() * number, relative.abs()
    else:
        first, distance = torch.zeros_like(relative), -relative.clamp(max=0)
    exact = number // 2
    scale = math.log(max_distance / exact)
    large = exact + (torch.log(distance.float() / exact) / scale * (number - exact)).long()
    return first + torch.where(distance < exact, distance, large.clamp(max=number - 1))


class RelativeAttention(SelfAttention):
    """Multi-head self-attention without scaling, with a learned bias for each bucket of relative positions and head.

    decodes: whether it is the decoder's, where a token attends to itself and earlier ones only.
    """

    TENSOR_PARALLEL: ClassVar = {**SelfAttention.TENSOR_PARALLEL, "relative_attention_bias": "table"}
    scale = 1.0
    bucket: Tensor

    def __init__(self, config: T5Config, decodes: bool) -> None:
        super().__init__(config, bias=False, biased=True)
        self.config, self.decodes, self.first_head = config, decodes, 0
        self.tokens = config.decoder_tokens if decodes else config.tokens
        # Three dimensions, as other biases of scores: weight decay leaves them out.
        self.relative_attention_bias = nn.Parameter(torch.empty(config.num_heads, 1, config.num_buckets))
        self.register_buffer("bucket", torch.empty(2 * self.tokens - 1, dtype=torch.int64), persistent=False)

    def reset_buffers(self) -> None:
        """Fill the buckets."""
        c = self.config
        self.bucket.copy_(buckets(self.tokens, c.num_buckets, c.max_distance, both_ways=not self.decodes))

    def added_to_scores(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """Return the biases with the masks: [1 or batch, heads, tokens, tokens]."""
        places = torch.arange(q.shape[2], device=self.bucket.device)
        relative = places - places[:, None]
        table = self.relative_attention_bias[self.first_head : self.first_head + q.shape[1], 0]
        # In the table's float32: the gradient of a bias sums those of many scores.
        bias = table[:, self.bucket][:, relative + self.tokens - 1].to(q.dtype)
        if self.decodes:
            bias = bias.masked_fill(relative > 0, masked(q.dtype))
        padding = padding_scores(mask, q.dtype)
        return bias[None] if padding is None else bias + padding


class CrossAttention(nn.Module):
    """Multi-head attention to the encoder's tokens, without scaling and biases.

    The rows of `kv` are ordered (head, k|v, feature).
    """

    TENSOR_PARALLEL: ClassVar = {"q": "column", "kv": "column", "proj": "row"}

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q = nn.Linear(config.embed_dim, config.inner_dim, bias=False)
        self.kv = StackedLinear(config.embed_dim, 2 * config.inner_dim, (config.head_dim,) * 2, bias=False)
        self.proj = nn.Linear(config.inner_dim, config.embed_dim, bias=False)
        self.divisible = {"head": config.num_heads}

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor | None) -> Tensor:
        """Return a tensor of the shape of `x`.

        x: the decoder's tokens [batch, tokens, width].
        encoded: the encoder's [batch, its tokens, width].
        mask: of all samples that `kv` gives, [batch, the encoder's tokens].
        """
        q = rearrange(self.q(x), "b s (h d) -> b h s d", d=self.head_dim)
        k, v = rearrange(self.kv(encoded), "b s (h two d) -> two b h s d", two=2, d=self.head_dim).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=padding_scores(mask, q.dtype), scale=1.0)
        return self.proj(rearrange(x, "b h s d -> b s (h d)"))


def _norm(config: T5Config) -> nn.Module:
    return nn.RMSNorm(config.embed_dim, eps=config.norm_eps)


class Embed(TextLayer):
    """Embedding layer of the encoder: token ids [batch, tokens] -> tokens [batch, tokens, width]."""

    TENSOR_PARALLEL: ClassVar = {"word_embeddings": "vocabulary_embedding"}

    def __init__(self, config: T5Config) -> None:
        super().__init__(0, config.dropout)
        self.word_embeddings = Embedding(config.vocab_size, config.embed_dim)

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """ids: int64 [batch, tokens]. keys: int64 [batch] or None (nothing is dropped)."""
        return self.dropped(self.word_embeddings(ids), keys, 0)


class DecoderEmbed(TextLayer):
    """Last norm of the encoder, and embedding layer of the decoder.

    Tokens [batch, tokens, width] -> [batch, tokens + the decoder's tokens, width].
    """

    TENSOR_PARALLEL: ClassVar = {"norm": "norm", "word_embeddings": "vocabulary_embedding"}

    def __init__(self, config: T5Config) -> None:
        super().__init__(1 + config.depth, config.dropout)
        self.norm = _norm(config)
        self.word_embeddings = Embedding(config.vocab_size, config.embed_dim)

    def forward(self, x: Tensor, decoder_input_ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """x: the encoder's tokens. decoder_input_ids: int64 [batch, the decoder's tokens]."""
        encoded = self.dropped(self.norm(x), keys, 0)
        return torch.cat([encoded, self.dropped(self.word_embeddings(decoder_input_ids), keys, 1)], dim=1)


class T5Block(TextLayer):
    """Base of the blocks of the encoder and, where it `decodes`, of the decoder.

    index: number of the block in the model.
    """

    TENSOR_PARALLEL: ClassVar = {"norm1": "norm", "norm2": "norm"}

    def __init__(self, config: T5Config, index: int, decodes: bool) -> None:
        super().__init__(1 + index, config.dropout)
        self.norm1, self.norm2 = _norm(config), _norm(config)
        if decodes:
            self.norm3 = _norm(config)
        self.attn = RelativeAttention(config, decodes)
        if decodes:
            self.cross_attn = CrossAttention(config)
        self.mlp = MLP(config.embed_dim, config.mlp_hidden_dim, config.activation, bias=False)

    def take_heads(self, index: int, parts: int) -> None:
        self.attn.first_head = index * self.attn.config.num_heads // parts

    def reset_buffers(self) -> None:
        super().reset_buffers()
        self.attn.reset_buffers()


class EncoderBlock(T5Block):
    """Block of the encoder: tokens [batch, tokens, width] -> the same shape."""

    GROUP_SIDES = ("attention_mask",)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Return the tokens.

        x: [batch, tokens, width].
        attention_mask: int or bool [samples of the tensor-parallel group, tokens], 0 for padding; None for none.
        keys: int64 [batch] or None (nothing is dropped).
        """
        x = x + self.dropped(self.attn(self.norm1(x), attention_mask), keys, 0)
        return x + self.dropped(self.mlp(self.norm2(x)), keys, 1)


class DecoderBlock(T5Block):
    """Block of the decoder: tokens of encoder and decoder [batch, tokens, width] -> the same shape."""

    TENSOR_PARALLEL: ClassVar = {"norm1": "norm", "norm2": "norm", "norm3": "norm"}
    GROUP_SIDES = ("attention_mask", "decoder_attention_mask")

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens of both; those of the encoder are those of `x`.

        x: [batch, tokens, width].
        attention_mask, decoder_attention_mask: of the tokens of encoder and decoder, int or bool [samples of the
            tensor-parallel group, tokens], 0 for padding; None for none.
        keys: int64 [batch] or None (nothing is dropped).
        """
        encoded, x = x[:, : -self.attn.tokens], x[:, -self.attn.tokens :]
        x = x + self.dropped(self.attn(self.norm1(x), decoder_attention_mask), keys, 0)
        x = x + self.dropped(self.cross_attn(self.norm2(x), encoded, attention_mask), keys, 1)
        x = x + self.dropped(self.mlp(self.norm3(x)), keys, 2)
        return torch.cat([encoded, x], dim=1)


class Head(TextLayer):
    """Output layer: tokens of encoder and decoder [batch, tokens, width] -> logits [batch, its tokens, vocabulary]."""

    TENSOR_PARALLEL: ClassVar = {"norm": "norm", "fc": "vocabulary_output"}

    def __init__(self, config: T5Config) -> None:
        super().__init__(len(config.layer_names) - 1, config.dropout)
        self.decoder_tokens, self.scale = config.decoder_tokens, config.embed_dim**-0.5 if config.tied else None
        self.norm = _norm(config)
        self.fc = TokenLogits(config.embed_dim, config.vocab_size, bias=False)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x: [batch, tokens, width] -> [batch, the decoder's tokens, vocabulary]."""
        x = self.dropped(self.norm(x[:, -self.decoder_tokens :]), keys, 0)
        return self.fc(x if self.scale is None else x * self.scale)


def build_block(config: T5Config, index: int) -> Layer:
    """Return a block by its number in the model."""
    if index == config.depth:
        return DecoderEmbed(config)
    decodes = index > config.depth
    return (DecoderBlock if decodes else EncoderBlock)(config, index, decodes)


def _deviation(of: Callable[[T5Config], float]) -> Callable[..., Tensor]:
    """Return the rule of normal numbers whose standard deviation is a function of the configuration."""
    return lambda v, shape, c: normal(of(c))(v, shape, c)


def _queries_keys_values(v: Tensor, shape: torch.Size, c: T5Config, start: int) -> Tensor:
    """Return normal numbers, those of queries divided by the root of a head's features: attention does not scale."""
    rows = torch.arange(start, start + v.numel()) // shape[1]
    queries = rows // c.head_dim % 3 == 0
    return normal(c.embed_dim**-0.5)(v, shape, c).mul_(torch.where(queries, c.head_dim**-0.5, 1.0))


_queries_keys_values.by_place = True  # type: ignore[attr-defined]

SCHEMES: dict[str, Rules] = {
    "t5": (
        ("*norm*.weight", constant(1.0)),
        ("*.word_embeddings.weight", normal(1.0)),
        ("head.fc.weight", normal(1.0)),
        ("*.relative_attention_bias", _deviation(lambda c: c.embed_dim**-0.5)),
        ("*.attn.qkv.weight", _queries_keys_values),
        ("*.cross_attn.q.weight", _deviation(lambda c: (c.embed_dim * c.head_dim) ** -0.5)),
        ("*.proj.weight", _deviation(lambda c: c.inner_dim**-0.5)),
        ("*.fc2.weight", _deviation(lambda c: c.mlp_hidden_dim**-0.5)),
        ("*", _deviation(lambda c: c.embed_dim**-0.5)),
    ),
    # Biases by relative position as large as the scores, so that mistakes in them show.
    "perturbed": (
        ("*norm*.weight", normal(0.1, mean=1.0)),
        ("*.relative_attention_bias", normal(0.5)),
        ("*.word_embeddings.weight", normal(math.sqrt(0.5))),
        ("*", lecun_normal),
    ),
}
"""The rules of each scheme; the first pattern that matches a parameter's name decides."""
