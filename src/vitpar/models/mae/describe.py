"""Description of a masked autoencoder's layers, without torch."""

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

if TYPE_CHECKING:
    from vitpar.models.mae.config import MAEConfig
    from vitpar.models.vit.config import ViTConfig


def describe(config: MAEConfig) -> tuple[LayerDescription, ...]:
    """Return the layers: embed, the encoder's blocks, the decoder's embedding and its blocks, head."""
    c = config
    return (
        _embed(c),
        *(_block(c.encoder, index, "encoder", _visible(c)) for index in range(c.depth)),
        _dec_embed(c),
        *(_block(c.decoder, c.depth + 1 + index, "decoder", _every(c)) for index in range(c.decoder_depth)),
        _head(c),
    )


def _visible(c: MAEConfig) -> TensorSpec:
    return TensorSpec(1 + c.visible, c.embed_dim)


def _every(c: MAEConfig) -> TensorSpec:
    return TensorSpec(1 + c.patches, c.decoder_embed_dim)


def _embed(c: MAEConfig) -> LayerDescription:
    parts = (
        linear("patch_embed.proj", "embedding", c.patch_values, c.embed_dim, c.visible),
        parameter("cls_token", "token", 1, 1, c.embed_dim),
    )
    return LayerDescription("embed", "embed", None, _visible(c), parts)


def _block(c: ViTConfig, index: int, kind: str, shape: TensorSpec) -> LayerDescription:
    """Return a block of the encoder or decoder. c: its sizes. index: number of the block in the model."""
    d, h, s = c.embed_dim, c.mlp_hidden_dim, shape.tokens
    parts = (
        norm("norm1", d, s),
        linear("attn.qkv", "column", d, 3 * d, s, stacked=(c.head_dim,) * 3),
        linear("attn.proj", "row", d, d, s),
        norm("norm2", d, s),
        linear("mlp.fc1", "column", d, h, s),
        linear("mlp.fc2", "row", h, d, s),
    )
    return LayerDescription(
        block_name(index),
        kind,
        shape,
        shape,
        parts,
        AttentionShape(s, c.num_heads, c.head_dim, packed=c.packs_attention),
        group=kind,
        divisible={"head": c.num_heads, "hidden feature": h},
    )


def _dec_embed(c: MAEConfig) -> LayerDescription:
    tokens = 1 + c.visible
    parts = (
        norm("norm", c.embed_dim, tokens),
        linear("proj", "merge", c.embed_dim, c.decoder_embed_dim, tokens),
        parameter("mask_token", "token", 1, 1, c.decoder_embed_dim),
    )
    return LayerDescription(
        c.dec_embed,
        "dec_embed",
        _visible(c),
        _every(c),
        parts,
        group="dec_embed",
        divisible={"incoming feature": c.embed_dim, "outgoing feature": c.decoder_embed_dim},
    )


def _head(c: MAEConfig) -> LayerDescription:
    d, n = c.decoder_embed_dim, c.patches
    parts = (
        norm("norm", d, n),
        Part("gathered", "gathered", tokens=n, width=d),
        linear("fc", "classifier", d, c.patch_values, n),
    )
    return LayerDescription(
        "head",
        "head",
        _every(c),
        TensorSpec(n, c.patch_values),
        parts,
        divisible={"classifier feature": d},
        last=True,
    )
