"""Description of a Vision Transformer's layers, without torch."""

from __future__ import annotations

from functools import partial
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
    from vitpar.models.vit.config import ViTConfig


def describe(config: ViTConfig) -> tuple[LayerDescription, ...]:
    """Return the layers of a Vision Transformer: embed, blocks, head."""
    block = _parallel_block if config.parallel_blocks else _block
    return _embed(config), *(block(config, index) for index in range(config.depth)), _head(config)


def _shape(c: ViTConfig) -> TensorSpec:
    return TensorSpec(c.tokens, c.embed_dim)


def _embed(c: ViTConfig) -> LayerDescription:
    d = c.embed_dim
    learned = {
        "cls_token": c.pool == "cls",
        "dist_token": c.distillation,
        "reg_token": c.num_reg_tokens,
        "pos_embed": c.positions,
    }
    parts = (
        linear("patch_embed.proj", "embedding", c.channels * c.patch_size**2, d, c.patches),
        *(parameter(name, "token", 1, int(count), d) for name, count in learned.items() if count),
    )
    return LayerDescription("embed", "embed", None, _shape(c), parts)


def _block(c: ViTConfig, index: int) -> LayerDescription:
    d, h, s, normed = c.embed_dim, c.mlp_hidden_dim, c.tokens, partial(norm, bias=c.norm == "layer")
    scaled = c.layer_scale is not None
    parts = (
        normed("norm1", d, s),
        linear("attn.qkv", "column", d, 3 * d, s, bias=c.qkv_bias == "all", stacked=(c.head_dim,) * 3),
        *_of_heads(c, "attn."),
        *([normed("attn.norm", d, s, "inner_norm")] * c.attn_norm),
        linear("attn.proj", "row", d, d, s),
        *([parameter("ls1.gamma", "scale", d)] * scaled),
        normed("norm2", d, s),
        linear("mlp.fc1", "column", d, c.gates * h, s, stacked=(1, 1) * (c.gates - 1)),
        *([Part("mlp.activation", "gate", tokens=s, width=h)] * (c.gates - 1)),
        *([normed("mlp.norm", h, s, "inner_norm")] * c.mlp_norm),
        linear("mlp.fc2", "row", h, d, s),
        *([parameter("ls2.gamma", "scale", d)] * scaled),
    )
    return _of_blocks(c, index, parts)


def _parallel_block(c: ViTConfig, index: int) -> LayerDescription:
    d, h, s = c.embed_dim, c.mlp_hidden_dim, c.tokens
    parts = (
        norm("norm1", d, s, bias=c.norm == "layer"),
        linear(
            "in_proj",
            "column",
            d,
            3 * d + c.gates * h,
            s,
            bias=c.qkv_bias == "all",
            # Gates and values alternate, and count as one map here.
            stacked=(*(c.head_dim,) * 3, c.gates * h // c.num_heads),
        ),
        *_of_heads(c, ""),
        *([parameter("mlp_bias", "per_head", c.gates * h)] * (c.qkv_bias != "all")),
        *([Part("activation", "gate", tokens=s, width=h)] * (c.gates - 1)),
        linear("out_proj", "row", d + h, d, s),
        *([parameter("ls1.gamma", "scale", d)] * (c.layer_scale is not None)),
    )
    return _of_blocks(c, index, parts)


def _of_heads(c: ViTConfig, start: str) -> tuple[Part, ...]:
    """Return what queries, keys and values have beside their linear layer. start: of the names."""
    normed = partial(norm, bias=c.norm == "layer")
    return (
        *(
            normed(f"{start}{name}", c.head_dim, c.tokens * c.num_heads, "heads")
            for name in ("q_norm", "k_norm") * c.qk_norm
        ),
        *(parameter(f"{start}{name}", "per_head", c.embed_dim) for name in ("q_bias", "v_bias") * (c.qkv_bias == "qv")),
    )


def _of_blocks(c: ViTConfig, index: int, parts: tuple[Part, ...]) -> LayerDescription:
    return LayerDescription(
        block_name(index),
        "block",
        _shape(c),
        _shape(c),
        parts,
        AttentionShape(c.tokens, c.num_heads, c.head_dim, packed=c.packs_attention),
        divisible={"head": c.num_heads, "hidden feature": c.mlp_hidden_dim},
    )


def _head(c: ViTConfig) -> LayerDescription:
    d, hidden, read, normed = (
        c.embed_dim,
        c.representation_size,
        1 + c.distillation,
        partial(norm, bias=c.norm == "layer"),
    )
    patches = c.tokens - c.prefix_tokens
    normalised = patches if c.pool == "map" else c.tokens if c.pool == "avg" and not c.fc_norm else read
    pooling = _attention_pooling(c, patches) if c.pool == "map" else ()
    parts = (
        normed("norm", d, normalised),
        *pooling,
        Part("pooled", "pooled", tokens=read, width=d),
        *([linear("representation", "representation", d, hidden, read)] if hidden else []),
        *(linear(name, "classifier", c.features, c.num_classes, 1) for name in ("fc", "fc_dist")[:read]),
    )
    return LayerDescription(
        "head",
        "head",
        _shape(c),
        TensorSpec(1, c.num_classes),
        parts,
        divisible={
            "classifier feature": c.features,
            **({"head": c.num_heads, "hidden feature": c.mlp_hidden_dim} if pooling else {}),
        },
        other_flops=4 * patches * d if pooling else 0,
        last=True,
    )


def _attention_pooling(c: ViTConfig, patches: int) -> tuple[Part, ...]:
    d, h, start = c.embed_dim, c.mlp_hidden_dim, "attn_pool."
    return (
        parameter(f"{start}latent", "heads", 1, 1, d),
        Part(f"{start}q", "per_head", {"weight": (d, d), "bias": (d,)}),
        linear(f"{start}kv", "column", d, 2 * d, patches),
        linear(f"{start}proj", "row", d, d, 1),
        norm(f"{start}norm", d, 1, bias=c.norm == "layer"),
        linear(f"{start}mlp.fc1", "column", d, h, 1),
        linear(f"{start}mlp.fc2", "row", h, d, 1),
    )
