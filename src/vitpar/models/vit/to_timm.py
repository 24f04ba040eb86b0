"""A Vision Transformer as timm has it: its tensors, and the arguments of ``VisionTransformer`` or ``Eva`` (1.0).

These take most settings as arguments that JSON can hold. What they do not take has to be that of the architecture whose
name is written.
"""

from __future__ import annotations

import math
from typing import Any

from vitpar.models.exporting import alone, classifier, linear, patches, refuse, rows
from vitpar.models.foreign import Exported, ExportedTensor
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.export_parts import mlp, queries
from vitpar.models.vit.layers import sincos_2d
from vitpar.models.vit.names import PUBLISHED


def to_timm(c: ViTConfig) -> Exported:
    """Return the model as timm has it. Raises DataError for parts that no model of timm has."""
    eva = c.rope != "none" or c.qkv_bias == "qv"
    refuse(
        c,
        "timm",
        {
            "a representation layer": c.representation_size is not None,
            "the activation geglu": c.activation == "geglu",
            "parallel blocks": c.parallel_blocks,
            "rotated registers": c.rope_register_temperature is not None,
            "RMSNorm with rotary positions": eva and c.norm == "rms",
            f"the activation {c.activation} with rotary positions": eva and c.activation == "gelu_tanh",
            "attention pooling with rotary positions or keys without biases": eva and c.pool == "map",
            "a distillation token with other parts than DeiT's": c.distillation
            and (eva or c.num_reg_tokens > 0 or not c.prefix_positions or c.position != "learned" or c.gates == 2),
            "a gated MLP with RMSNorm": c.gates == 2 and c.norm == "rms",
            "fixed positions with rotary ones": eva and c.position == "sincos2d",
        },
    )
    normed, split = c.norm == "layer", eva and c.mlp_norm and c.gates == 2
    tensors = patches("patch_embed.proj", c.channels, c.patch_size)
    tensors |= {"cls_token": alone("embed.cls_token")} if c.pool == "cls" else {}
    tensors |= {"dist_token": alone("embed.dist_token")} if c.distillation else {}
    tensors |= {"reg_token": alone("embed.reg_token")} if c.num_reg_tokens else {}
    if c.position == "learned":
        tensors["pos_embed"] = alone("embed.pos_embed")
    elif c.position == "sincos2d":
        side = c.image_size // c.patch_size
        tensors["pos_embed"] = ExportedTensor((), lambda: sincos_2d(side, side, c.embed_dim)[None])
    for index in range(c.depth):
        start = f"blocks.{index}"
        tensors |= linear(f"{start}.norm1", f"{start}.norm1", bias=normed)
        tensors |= queries(c, f"{start}.attn", ("qkv",), f"{start}.attn")
        tensors |= linear(f"{start}.attn.proj", f"{start}.attn.proj")
        tensors |= linear(f"{start}.norm2", f"{start}.norm2", bias=normed)
        names = ("fc1_g", "fc1_x", "fc2") if split else ("fc1", "fc2")
        tensors |= mlp(c, f"{start}.mlp", names, f"{start}.mlp")
        norms = {"attn.q_norm": c.qk_norm, "attn.k_norm": c.qk_norm, "attn.norm": c.attn_norm, "mlp.norm": c.mlp_norm}
        for name in (name for name, there in norms.items() if there):
            tensors |= linear(f"{start}.{name}", f"{start}.{name}", bias=normed)
        if c.layer_scale is not None:
            scales = ("gamma_1", "gamma_2") if eva else ("ls1.gamma", "ls2.gamma")
            tensors |= {f"{start}.{name}": alone(f"{start}.ls{n}.gamma") for n, name in enumerate(scales, start=1)}
    tensors |= linear("fc_norm" if c.fc_norm else "norm", "head.norm", bias=normed)
    if c.pool == "map":
        tensors["attn_pool.latent"] = alone("head.attn_pool.latent")
        for name in ("q", "proj", "mlp.fc1", "mlp.fc2"):
            tensors |= linear(f"attn_pool.{name}", f"head.attn_pool.{name}")
        tensors |= linear("attn_pool.norm", "head.attn_pool.norm", bias=normed)
        for end in ("weight", "bias"):
            ours = f"head.attn_pool.kv.{end}"
            tensors[f"attn_pool.kv.{end}"] = ExportedTensor((ours,), rows(c.num_heads, 2))
    tensors |= classifier("head", *(["head_dist"] if c.distillation else []))
    notes = []
    eps = 1e-5 if eva and c.norm_eps == 1e-5 else 1e-6
    if c.norm_eps != eps:
        notes.append(f"timm's norms have an epsilon of {eps:g}, this model's {c.norm_eps:g}: outputs differ a little")
    if c.position == "sincos2d":
        notes.append("the fixed positions become learned ones, which timm would train")
    pool = {"cls": "token"}.get(c.pool, c.pool)
    config = {
        "architecture": _architecture(c, eva),
        "num_classes": c.num_classes,
        "num_features": c.embed_dim,
        "global_pool": pool,
        "model_args": {"global_pool": pool, **(_eva_arguments if eva else _vit_arguments)(c)},
    }
    return Exported(tensors, config, notes=tuple(notes))


def _architecture(c: ViTConfig, eva: bool) -> str:
    """Return timm's name of a model that differs from this one only in what `model_args` say."""
    name = c.name.partition(".")[0]
    theirs = name in PUBLISHED and not name.startswith(("vit5", "vit_22b"))
    if eva:
        wanted = "vit_base_patch16_dinov3" if c.norm_eps == 1e-5 else "eva02_base_patch14_224"
        same = theirs and (name.startswith("eva02") if c.norm_eps != 1e-5 else "dinov3" in name)
        return name if same else wanted
    if c.distillation:
        return name if theirs and "distilled" in name else "deit_base_distilled_patch16_224"
    if c.gates == 2:  # the only one with a gated MLP, which is no argument in JSON
        return name if theirs and name.startswith("vit_giant") and "dinov2" in name else "vit_giant_patch14_dinov2"
    plain = theirs and not name.startswith(("eva02", "vit_giant")) and "dinov3" not in name and "distilled" not in name
    return name if plain else "vit_base_patch16_224"


def _ratio(width: int, features: int) -> float:
    """Return the shortest ratio for which int(width · ratio) is `features`, as timm computes it."""
    exact = features / width
    for ratio in (*(round(exact, digits) for digits in range(8)), exact):
        if int(width * ratio) == features:
            return ratio
    return math.nextafter(exact, math.inf)


def _common_arguments(c: ViTConfig) -> dict[str, Any]:
    return {
        "img_size": c.image_size,
        "patch_size": c.patch_size,
        "in_chans": c.channels,
        "embed_dim": c.embed_dim,
        "depth": c.depth,
        "num_heads": c.num_heads,
        "qk_norm": c.qk_norm,
        "init_values": c.layer_scale,
        "class_token": c.pool == "cls",
        "no_embed_class": not c.prefix_positions or c.position == "sincos2d",
        "drop_path_rate": c.drop_path,
        "proj_drop_rate": c.dropout,
        "pos_drop_rate": c.dropout,
    }


def _vit_arguments(c: ViTConfig) -> dict[str, Any]:
    arguments = _common_arguments(c) | {
        "mlp_ratio": _ratio(c.embed_dim, c.gates * c.mlp_hidden_dim),
        "qkv_bias": c.qkv_bias == "all",
        "scale_attn_norm": c.attn_norm,
        "scale_mlp_norm": c.mlp_norm,
        "reg_tokens": c.num_reg_tokens,
        "fc_norm": c.fc_norm,
        "dynamic_img_size": False,
    }
    if c.position == "none":
        arguments["pos_embed"] = "none"
    if c.norm == "rms":
        arguments["norm_layer"] = "rmsnorm"
    if c.activation == "gelu_tanh":
        arguments["act_layer"] = "gelu_tanh"
    return arguments


def _eva_arguments(c: ViTConfig) -> dict[str, Any]:
    rotated = {
        "rope_type": {"axial": "cat"}.get(c.rope, c.rope),
        "rope_temperature": c.rope_temperature,
        "rope_rotate_half": c.rope == "dinov3",
        "ref_feat_shape": None if c.rope_grid is None else [c.rope_grid, c.rope_grid],
    }
    return _common_arguments(c) | {
        "mlp_ratio": _ratio(c.embed_dim, c.mlp_hidden_dim),
        "qkv_bias": c.qkv_bias != "none",
        "qkv_fused": True,
        "attn_type": "rope" if c.qkv_bias == "all" else "eva",
        "swiglu_mlp": c.gates == 2,
        "swiglu_align_to": 0,
        "scale_mlp": c.mlp_norm,
        "scale_attn_inner": c.attn_norm,
        "num_reg_tokens": c.num_reg_tokens,
        "use_abs_pos_emb": c.position == "learned",
        "use_rot_pos_emb": c.rope != "none",
        "use_fc_norm": c.fc_norm,
        "dynamic_img_size": False,
        **(rotated if c.rope != "none" else {}),
    }
