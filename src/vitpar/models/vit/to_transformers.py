"""A Vision Transformer as transformers has it: ViT, DeiT, DINOv2 with and without registers, DINOv3, SigLIP (5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vitpar.errors import DataError
from vitpar.models.exporting import alone, classifier, linear, patches, refuse, rows
from vitpar.models.foreign import Exported, ExportedTensor
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.export_parts import mlp, queries


def to_transformers(c: ViTConfig) -> Exported:
    """Return the model as transformers has it. Raises DataError for parts that none of its models has."""
    kind = _kind(c)
    refuse(
        c,
        "transformers",
        {
            "a representation layer": c.representation_size is not None,
            "RMSNorm": c.norm == "rms",
            "norms of queries and keys": c.qk_norm,
            "norms inside attention or MLP": c.attn_norm or c.mlp_norm,
            "parallel blocks": c.parallel_blocks,
            "fixed positions": c.position == "sincos2d",
            "a norm after the mean over tokens": c.fc_norm,
            f"the activation {c.activation}": c.activation not in _ACTIVATIONS[kind],
            "rotary positions of EVA-02": c.rope == "axial",
            "positions without rotary ones": kind == "dinov3_vit" and c.position != "none",
            "no positions": kind != "dinov3_vit" and c.position == "none",
            "registers": bool(c.num_reg_tokens) and kind not in ("dinov3_vit", "dinov2_with_registers"),
            "a mean over tokens": c.pool == "avg" and kind not in ("siglip", "dinov3_vit"),
            "attention pooling with rotary positions": c.pool == "map" and kind == "dinov3_vit",
            "a scale of residual branches": c.layer_scale is not None and not kind.startswith("dinov"),
            "a distillation token with other parts than DeiT's": c.distillation and kind != "deit",
            "no class token": kind == "dinov3_vit" and c.pool == "avg" and not c.num_reg_tokens,
            "queries without biases": c.qkv_bias != "all" and kind not in ("dinov3_vit", "vit"),
            "keys without biases": c.qkv_bias == "qv" and kind == "vit",
            "no scale of residual branches": c.layer_scale is None and kind.startswith("dinov"),
            "positions of patches alone, without registers": not c.prefix_positions
            and kind in ("vit", "deit", "dinov2")
            and c.prefix_tokens > 0,
            "positions of registers": c.prefix_positions and kind == "dinov2_with_registers",
        },
    )
    return {"vit": _vit, "deit": _vit, "siglip": _siglip, "siglip_vision_model": _siglip}.get(kind, _dino)(c, kind)


_ACTIVATIONS = {
    **dict.fromkeys(("vit", "deit"), ("gelu", "gelu_tanh")),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), ("gelu", "swiglu")),
    "dinov3_vit": ("gelu", "gelu_tanh", "swiglu"),
    **dict.fromkeys(("siglip", "siglip_vision_model"), ("gelu", "gelu_tanh")),
}
"""Activations that a type of transformers' models can have."""
_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "swiglu": "silu"}
"""transformers' names of activations."""


def _kind(c: ViTConfig) -> str:
    """Return the type of transformers' model that comes closest."""
    if c.rope == "dinov3":
        return "dinov3_vit"
    if c.pool == "map":
        return "siglip_vision_model"
    if c.pool == "avg":
        return "siglip"
    if c.layer_scale is not None:
        return "dinov2_with_registers" if c.num_reg_tokens else "dinov2"
    return "deit" if c.distillation else "vit"


def _sizes(c: ViTConfig, kind: str, model: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        "architectures": [model],
        "hidden_size": c.embed_dim,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.mlp_hidden_dim,
        "hidden_act": _NAMES[c.activation],
        "layer_norm_eps": c.norm_eps,
        "image_size": c.image_size,
        "patch_size": c.patch_size,
        "num_channels": c.channels,
    }


def labels(names: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a config.json that name the classes."""
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def _labels(c: ViTConfig) -> dict[str, Any]:
    return labels([f"LABEL_{index}" for index in range(c.num_classes)])


def _vit(c: ViTConfig, kind: str) -> Exported:
    start = f"{kind}."
    tensors = patches(f"{start}embeddings.patch_embeddings.projection", c.channels, c.patch_size)
    tensors[f"{start}embeddings.cls_token"] = alone("embed.cls_token")
    if c.distillation:
        tensors[f"{start}embeddings.distillation_token"] = alone("embed.dist_token")
    tensors[f"{start}embeddings.position_embeddings"] = alone("embed.pos_embed")
    for index in range(c.depth):
        theirs, ours = f"{start}encoder.layer.{index}", f"blocks.{index}"
        tensors |= linear(f"{theirs}.layernorm_before", f"{ours}.norm1")
        tensors |= queries(c, f"{theirs}.attention.attention", ("query", "key", "value"), f"{ours}.attn")
        tensors |= linear(f"{theirs}.attention.output.dense", f"{ours}.attn.proj")
        tensors |= linear(f"{theirs}.layernorm_after", f"{ours}.norm2")
        tensors |= linear(f"{theirs}.intermediate.dense", f"{ours}.mlp.fc1")
        tensors |= linear(f"{theirs}.output.dense", f"{ours}.mlp.fc2")
    tensors |= linear(f"{start}layernorm", "head.norm")
    names = ("cls_classifier", "distillation_classifier") if c.distillation else ("classifier",)
    tensors |= classifier(*names)
    model = "DeiTForImageClassificationWithTeacher" if c.distillation else "ViTForImageClassification"
    return Exported(tensors, _sizes(c, kind, model) | _labels(c) | {"qkv_bias": c.qkv_bias == "all"})


def _dino(c: ViTConfig, kind: str) -> Exported:
    third = kind == "dinov3_vit"
    model = {"dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel"}.get(kind, "DINOv3ViTModel")
    tensors = patches(f"embeddings.patch_embeddings{'' if third else '.projection'}", c.channels, c.patch_size)
    if c.pool == "cls":
        tensors["embeddings.cls_token"], registers = alone("embed.cls_token"), alone("embed.reg_token")
        if not c.num_reg_tokens:
            registers = ExportedTensor((), lambda: torch.zeros(1, 0, c.embed_dim))
    else:  # transformers' model has a class token in any case: the first register
        tensors["embeddings.cls_token"] = ExportedTensor(("embed.reg_token",), lambda tokens: tokens[:, :1])
        registers = ExportedTensor(("embed.reg_token",), lambda tokens: tokens[:, 1:])
    shape = (1, 1, c.embed_dim) if third else (1, c.embed_dim)
    tensors["embeddings.mask_token"] = ExportedTensor((), lambda: torch.zeros(shape))
    if c.num_reg_tokens or third:
        tensors["embeddings.register_tokens"] = registers
    if kind == "dinov2":
        tensors["embeddings.position_embeddings"] = alone("embed.pos_embed")
    elif not third:
        # The class token's position is a part of the token itself.
        tensors["embeddings.position_embeddings"] = ExportedTensor(
            ("embed.pos_embed",), lambda table: torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
        )
    for index in range(c.depth):
        ours, theirs = f"blocks.{index}", f"layer.{index}" if third else f"encoder.layer.{index}"
        letters = tuple(f"{letter}_proj" for letter in "qkv") if third else ("query", "key", "value")
        attention = f"{theirs}.attention" if third else f"{theirs}.attention.attention"
        tensors |= queries(c, attention, letters, f"{ours}.attn")
        tensors |= linear(
            f"{theirs}.attention.o_proj" if third else f"{theirs}.attention.output.dense", f"{ours}.attn.proj"
        )
        for number in (1, 2):
            tensors |= linear(f"{theirs}.norm{number}", f"{ours}.norm{number}")
            tensors[f"{theirs}.layer_scale{number}.lambda1"] = alone(f"{ours}.ls{number}.gamma")
        plain = ("up_proj", "down_proj") if third else ("fc1", "fc2")
        gated = ("gate_proj", "up_proj", "down_proj") if third else ("weights_in", "weights_out")
        tensors |= mlp(c, f"{theirs}.mlp", gated if c.gates == 2 else plain, f"{ours}.mlp")
    tensors |= linear("norm" if third else "layernorm", "head.norm")
    config = _sizes(c, kind, model) | {"layerscale_value": c.layer_scale, "use_mask_token": True}
    if third:
        config |= {
            "query_bias": c.qkv_bias != "none",
            "key_bias": c.qkv_bias == "all",
            "value_bias": c.qkv_bias != "none",
            "use_gated_mlp": c.gates == 2,
            "num_register_tokens": c.num_reg_tokens - (c.pool != "cls"),
            "rope_theta": c.rope_temperature,
            "pos_embed_rescale": None,
        }
    else:
        config |= {"use_swiglu_ffn": c.gates == 2, "mlp_ratio": _dinov2_ratio(c), "hidden_act": "gelu"}
        config |= {"num_register_tokens": c.num_reg_tokens} if c.num_reg_tokens else {}
    note = (
        f"transformers' {model} has no classifier like this one: it is in classifier.safetensors, and reads "
        f"{'the output of the class token' if c.pool == 'cls' else 'the mean of the outputs of the patches'}"
    )
    return Exported(tensors, config, classifier("classifier"), (note,))


def _dinov2_ratio(c: ViTConfig) -> int:
    """Return the whole ratio that transformers computes the hidden features from. Raises DataError if there is none."""
    for ratio in range(1, 65):
        hidden = ratio * c.embed_dim
        if (hidden if c.gates == 1 else (int(hidden * 2 / 3) + 7) // 8 * 8) == c.mlp_hidden_dim:
            return ratio
    raise DataError(
        f"mlp_hidden_dim of {c.name} is {c.mlp_hidden_dim:,}, which transformers' DINOv2 cannot have: use --format timm"
    )


def _siglip(c: ViTConfig, kind: str) -> Exported:
    start = "vision_model."
    tensors = patches(f"{start}embeddings.patch_embedding", c.channels, c.patch_size)
    tensors[f"{start}embeddings.position_embedding.weight"] = ExportedTensor(("embed.pos_embed",), lambda t: t[0])
    for index in range(c.depth):
        theirs, ours = f"{start}encoder.layers.{index}", f"blocks.{index}"
        tensors |= linear(f"{theirs}.layer_norm1", f"{ours}.norm1")
        tensors |= queries(c, f"{theirs}.self_attn", ("q_proj", "k_proj", "v_proj"), f"{ours}.attn")
        tensors |= linear(f"{theirs}.self_attn.out_proj", f"{ours}.attn.proj")
        tensors |= linear(f"{theirs}.layer_norm2", f"{ours}.norm2")
        tensors |= mlp(c, f"{theirs}.mlp", ("fc1", "fc2"), f"{ours}.mlp")
    tensors |= linear(f"{start}post_layernorm", "head.norm")
    if kind == "siglip":
        tower = _sizes(c, "siglip_vision_model", "SiglipVisionModel") | {"vision_use_head": False}
        text = {"model_type": "siglip_text_model", "hidden_size": c.embed_dim}
        config = {"model_type": kind, "architectures": ["SiglipForImageClassification"]}
        return Exported(
            tensors | classifier("classifier"), config | _labels(c) | {"vision_config": tower, "text_config": text}
        )
    head = f"{start}head"
    tensors[f"{head}.probe"] = alone("head.attn_pool.latent")
    for end in ("weight", "bias"):
        names = tuple(f"head.attn_pool.{name}.{end}" for name in ("q", "kv"))
        tensors[f"{head}.attention.in_proj_{end}"] = ExportedTensor(
            names, lambda q, kv: torch.cat([q, rows(c.num_heads, 2)(kv)])
        )
    tensors |= linear(f"{head}.attention.out_proj", "head.attn_pool.proj")
    tensors |= linear(f"{head}.layernorm", "head.attn_pool.norm")
    tensors |= mlp(c, f"{head}.mlp", ("fc1", "fc2"), "head.attn_pool.mlp")
    note = "transformers' SiglipVisionModel has no classifier: it is in classifier.safetensors, and reads its output"
    return Exported(tensors, _sizes(c, kind, "SiglipVisionModel"), classifier("classifier"), (note,))
