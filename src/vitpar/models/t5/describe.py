"""Description of T5's layers, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitpar.models.description import (
    AttentionShape,
    LayerDescription,
    Part,
    TensorSpec,
    block_name,
    linear,
    norm,
    parameter,
)
from vitpar.models.text import MODES, words

if TYPE_CHECKING:
    from vitpar.models.t5.config import T5Config


def describe(config: T5Config) -> tuple[LayerDescription, ...]:
    """Return the layers of a T5: embed, the encoder's blocks, the decoder's embedding and its blocks, head."""
    c = config
    after = c.depth + 1
    return (
        LayerDescription(
            "embed", "embed", None, _encoded(c), (words(c.vocab_size, c.embed_dim, c.tokens),), modes=MODES
        ),
        *(_encoder_block(c, index) for index in range(c.depth)),
        _dec_embed(c),
        *(_decoder_block(c, index) for index in range(after, after + c.decoder_depth)),
        _head(c),
    )


def _encoded(c: T5Config) -> TensorSpec:
    return TensorSpec(c.tokens, c.embed_dim)


def _both(c: T5Config) -> TensorSpec:
    return TensorSpec(c.tokens + c.decoder_tokens, c.embed_dim)


def _self_attention(c: T5Config, tokens: int) -> tuple[Part, ...]:
    return (
        norm("norm1", c.embed_dim, tokens, bias=False),
        linear("attn.qkv", "column", c.embed_dim, 3 * c.inner_dim, tokens, bias=False, stacked=(c.head_dim,) * 3),
        parameter("attn.relative_attention_bias", "table", c.num_heads, 1, c.num_buckets),
        linear("attn.proj", "row", c.inner_dim, c.embed_dim, tokens, bias=False),
    )


def _mlp(c: T5Config, number: int, tokens: int) -> tuple[Part, ...]:
    """Return the MLP and its norm, which is the block's norm `number`."""
    d, h = c.embed_dim, c.mlp_hidden_dim
    return (
        norm(f"norm{number}", d, tokens, bias=False),
        linear("mlp.fc1", "column", d, c.gates * h, tokens, bias=False, stacked=(1, 1) * (c.gates - 1)),
        *([Part("mlp.activation", "gate", tokens=tokens, width=h)] * (c.gates - 1)),
        linear("mlp.fc2", "row", h, d, tokens, bias=False),
    )


def _encoder_block(c: T5Config, index: int) -> LayerDescription:
    return LayerDescription(
        block_name(index),
        "encoder",
        _encoded(c),
        _encoded(c),
        (*_self_attention(c, c.tokens), *_mlp(c, 2, c.tokens)),
        AttentionShape(c.tokens, c.num_heads, c.head_dim, biased=True),
        group="encoder",
        divisible=_divisible(c),
        modes=MODES,
    )


def _dec_embed(c: T5Config) -> LayerDescription:
    parts = (norm("norm", c.embed_dim, c.tokens, bias=False), words(c.vocab_size, c.embed_dim, c.decoder_tokens))
    return LayerDescription(
        block_name(c.depth), "dec_embed", _encoded(c), _both(c), parts, group="dec_embed", modes=MODES
    )


def _decoder_block(c: T5Config, index: int) -> LayerDescription:
    d, inner, s = c.embed_dim, c.inner_dim, c.decoder_tokens
    parts = (
        *_self_attention(c, s),
        norm("norm2", d, s, bias=False),
        linear("cross_attn.q", "column", d, inner, s, bias=False),
        linear("cross_attn.kv", "column", d, 2 * inner, c.tokens, bias=False, stacked=(c.head_dim,) * 2),
        linear("cross_attn.proj", "row", inner, d, s, bias=False),
        *_mlp(c, 3, s),
    )
    return LayerDescription(
        block_name(index),
        "decoder",
        _both(c),
        _both(c),
        parts,
        AttentionShape(s, c.num_heads, c.head_dim, biased=True),
        group="decoder",
        divisible=_divisible(c),
        modes=MODES,
        other_flops=4 * s * c.tokens * inner,  # attention to the encoder's tokens
    )


def _head(c: T5Config) -> LayerDescription:
    s = c.decoder_tokens
    parts = (
        norm("norm", c.embed_dim, s, bias=False),
        linear("fc", "vocabulary_output", c.embed_dim, c.vocab_size, s, bias=False),
    )
    return LayerDescription("head", "head", _both(c), TensorSpec(s, c.vocab_size), parts, modes=MODES, last=True)


def _divisible(c: T5Config) -> dict[str, int]:
    return {"head": c.num_heads, "hidden feature": c.mlp_hidden_dim}
