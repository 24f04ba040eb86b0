"""A Vision Transformer's configuration as timm and transformers have it.

timm's ``VisionTransformer`` and ``Eva`` (1.0) take most settings as arguments that JSON can hold; the others have to be
those of the architecture whose name is written. transformers (5) has a type of model for each kind of parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vitpar.errors import DataError
from vitpar.limits import MAX_TOKENS
from vitpar.models.convert import Conversion, Exported
from vitpar.models.description import MadeTensor
from vitpar.models.rows import (
    TIMM,
    TRANSFORMERS_IMAGES,
    numbers,
    refuse_other_parts,
    settings_of,
    shortest_ratio,
)
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.published import PUBLISHED

_ARGUMENTS = (
    *TIMM,
    *numbers(depth="depth", qk_norm="qk_norm", init_values="layer_scale"),
    *numbers(proj_drop_rate="dropout", pos_drop_rate="dropout"),
)
"""Arguments of timm's models; of these, the number of heads and what `_said_by_timm` names are read."""
_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "swiglu": "silu"}
"""transformers' names of activations."""


def is_eva(c: ViTConfig) -> bool:
    """Return whether timm's class of the model is ``Eva``."""
    return c.rope != "none" or c.qkv_bias == "qv"


def kind(c: ViTConfig) -> str:
    """Return the type of transformers' model that comes closest."""
    if c.rope == "dinov3":
        return "dinov3_vit"
    if c.pool != "cls":
        return "siglip_vision_model" if c.pool == "map" else "siglip"
    if c.layer_scale is not None:
        return "dinov2_with_registers" if c.num_reg_tokens else "dinov2"
    return "deit" if c.distillation else "vit"


def timm(weights: Conversion, c: ViTConfig) -> Exported:
    """Return the model as timm has it. weights: conversion of the family. Raises DataError for parts that it lacks."""
    eva, notes = is_eva(c), list[str]()
    parts: dict[str, Sequence[Any]] = {"rope_register_temperature": [None], "activation": [*_NAMES]}
    if eva:
        parts |= {"activation": ("gelu", "swiglu"), "norm": ["layer"], "distillation": [False]}
        parts |= {"pool": ("cls", "avg"), "position": ("learned", "none")}
    else:
        if c.distillation:
            parts |= {"num_reg_tokens": [0], "prefix_positions": [True], "position": ["learned"]}
            parts["activation"] = ("gelu", "gelu_tanh")
        parts["norm"] = ("layer", "rms") if c.gates == 1 else ["layer"]
    refuse_other_parts(c, "timm", parts)
    eps = 1e-5 if eva and c.norm_eps == 1e-5 else 1e-6
    if c.norm_eps != eps:
        notes.append(f"timm's norms have an epsilon of {eps:g}, this model's {c.norm_eps:g}: outputs differ a little")
    if c.position == "sincos2d":
        notes.append("the fixed positions become learned ones, which timm would train")
    pool = {"cls": "token"}.get(c.pool, c.pool)
    settings = {
        "architecture": _architecture(c, eva),
        "num_classes": c.num_classes,
        "num_features": c.embed_dim,
        "global_pool": pool,
        "model_args": {
            "global_pool": pool,
            **settings_of(c, _ARGUMENTS),
            "class_token": c.pool == "cls",
            "no_embed_class": not c.prefix_positions or c.position == "sincos2d",
            "dynamic_img_size": False,
            **(_eva_arguments if eva else _vit_arguments)(c),
        },
    }
    return Exported(weights.tensors(c, "timm"), settings, notes=tuple(notes))


def _architecture(c: ViTConfig, eva: bool) -> str:
    """Return timm's name of a model that differs from this one only in what `model_args` say."""
    name = c.name.partition(".")[0]
    theirs = name in PUBLISHED and not name.startswith(("vit5", "vit_22b"))
    if eva:
        usual = "vit_base_patch16_dinov3" if c.norm_eps == 1e-5 else "eva02_base_patch14_224"
        same = theirs and (name.startswith("eva02") if c.norm_eps != 1e-5 else "dinov3" in name)
        return name if same else usual
    if c.distillation:
        return name if theirs and "distilled" in name else "deit_base_distilled_patch16_224"
    if c.gates == 2:  # the only one with a gated MLP, which is no argument in JSON
        return name if theirs and name.startswith("vit_giant") and "dinov2" in name else "vit_giant_patch14_dinov2"
    plain = theirs and not name.startswith(("eva02", "vit_giant")) and "dinov3" not in name and "distilled" not in name
    return name if plain else "vit_base_patch16_224"


def _vit_arguments(c: ViTConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "mlp_ratio": shortest_ratio([c.embed_dim], [c.gates * c.mlp_hidden_dim]),
        "qkv_bias": c.qkv_bias == "all",
        "scale_attn_norm": c.attn_norm,
        "scale_mlp_norm": c.mlp_norm,
        "reg_tokens": c.num_reg_tokens,
        "fc_norm": c.fc_norm,
    }
    given = {"pos_embed": c.position == "none" and "none", "norm_layer": c.norm == "rms" and "rmsnorm"}
    given["act_layer"] = c.activation == "gelu_tanh" and "gelu_tanh"
    return arguments | {name: word for name, word in given.items() if word}


def _eva_arguments(c: ViTConfig) -> dict[str, Any]:
    rotated = {
        "rope_type": {"axial": "cat"}.get(c.rope, c.rope),
        "rope_temperature": c.rope_temperature,
        "rope_rotate_half": c.rope == "dinov3",
        "ref_feat_shape": None if c.rope_grid is None else [c.rope_grid, c.rope_grid],
    }
    return {
        "mlp_ratio": shortest_ratio([c.embed_dim], [c.mlp_hidden_dim]),
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
        **(rotated if c.rope != "none" else {}),
    }


def labels(names: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a config.json that name the classes."""
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


_MODELS = {
    "vit": ("ViTForImageClassification", "vit.", "encoder.layer."),
    "deit": ("DeiTForImageClassificationWithTeacher", "deit.", "encoder.layer."),
    "dinov2": ("Dinov2Model", "", "encoder.layer."),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "", "encoder.layer."),
    "dinov3_vit": ("DINOv3ViTModel", "", "layer."),
    "siglip": ("SiglipForImageClassification", "vision_model.", "encoder.layers."),
    "siglip_vision_model": ("SiglipVisionModel", "vision_model.", "encoder.layers."),
}
"""Classes of transformers, and begin of the names of a model's tensors and of a block's, by type of model."""


def _parts_of_transformers(c: ViTConfig, kind: str) -> dict[str, Sequence[Any]]:
    """Return the values that fields of transformers' model may have. Parameters that it lacks are refused elsewhere."""
    parts: dict[str, Sequence[Any]] = {"norm": ["layer"], "fc_norm": [False]}
    if kind == "dinov3_vit":
        scales = [c.layer_scale] if c.layer_scale else []
        tokens = range(c.pool != "cls", MAX_TOKENS)  # the first register is a class token
        return parts | {"position": ["none"], "layer_scale": scales, "num_reg_tokens": tokens, "activation": [*_NAMES]}
    parts |= {"rope": ["none"], "position": ["learned"], "qkv_bias": ("all", "none") if kind == "vit" else ["all"]}
    if c.pool == "cls":
        parts["prefix_positions"] = [kind != "dinov2_with_registers"]
    return parts | {"activation": ("gelu", "swiglu") if kind.startswith("dinov2") else ("gelu", "gelu_tanh")}


def transformers(weights: Conversion, c: ViTConfig) -> Exported:
    """Return the model as transformers has it. weights, raises: as for `timm`."""
    refuse_other_parts(c, "transformers", _parts_of_transformers(c, this := kind(c)))
    model, start, block = _MODELS[this]
    tensors, classifier = dict[str, MadeTensor](), dict[str, MadeTensor]()
    for name, tensor in weights.tensors(c, "transformers").items():
        if "classifier." in name:
            classifier[name] = tensor
        else:
            tensors[start + re.sub(r"^layer\.", block, name)] = tensor
    settings = {"model_type": this, "architectures": [model], **settings_of(c, TRANSFORMERS_IMAGES)}
    settings |= {"hidden_act": _NAMES[c.activation]}
    if this.startswith("dinov"):
        settings |= {"layerscale_value": c.layer_scale, "use_mask_token": True}
    if this == "dinov3_vit":
        settings |= {
            "query_bias": c.qkv_bias != "none",
            "key_bias": c.qkv_bias == "all",
            "value_bias": c.qkv_bias != "none",
            "use_gated_mlp": c.gates == 2,
            "num_register_tokens": c.num_reg_tokens - (c.pool != "cls"),
            "rope_theta": c.rope_temperature,
            "pos_embed_rescale": None,
        }
    elif this.startswith("dinov2"):
        settings |= {"use_swiglu_ffn": c.gates == 2, "mlp_ratio": _dinov2_ratio(c), "hidden_act": "gelu"}
        settings |= {"num_register_tokens": c.num_reg_tokens} if c.num_reg_tokens else {}
    elif this == "siglip":
        tower = settings | {"model_type": "siglip_vision_model", "architectures": ["SiglipVisionModel"]}
        text = {"model_type": "siglip_text_model", "hidden_size": c.embed_dim}
        towers = {"vision_config": {**tower, "vision_use_head": False}, "text_config": text}
        settings = {"model_type": this, "architectures": [model], **towers}
    elif this != "siglip_vision_model":
        settings |= {"qkv_bias": c.qkv_bias == "all"}
    if "Classification" in model:
        settings |= labels([f"LABEL_{index}" for index in range(c.num_classes)])
        return Exported({**tensors, **classifier}, settings)
    reads = {"cls": "the output of the class token", "avg": "the mean of the outputs of the patches"}
    note = f"transformers' {model} has no classifier like this one: it is in classifier.safetensors, and reads "
    return Exported(tensors, settings, classifier, (note + reads.get(c.pool, "its pooled output"),))


def _dinov2_ratio(c: ViTConfig) -> int:
    """Return the whole ratio that transformers computes the hidden features from. Raises DataError if there is none."""
    for ratio in range(1, 65):
        hidden = ratio * c.embed_dim
        if (hidden if c.gates == 1 else (int(hidden * 2 / 3) + 7) // 8 * 8) == c.mlp_hidden_dim:
            return ratio
    raise DataError(
        f"mlp_hidden_dim of {c.name} is {c.mlp_hidden_dim:,}, which transformers' DINOv2 cannot have: use --format timm"
    )
