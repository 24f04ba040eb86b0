"""A Vision Transformer's configuration in other libraries: what a config.json says, what tensors show, what is written.

timm's ``VisionTransformer`` and ``Eva`` (1.0) take most settings as arguments that JSON can hold; the others have to be
those of the architecture whose name is written. transformers (5) has a type of model for each kind of parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitpar.errors import DataError
from vitpar.limits import MAX_TOKENS
from vitpar.models.config import GATED
from vitpar.models.config_keys import (
    TIMM,
    TRANSFORMERS,
    TRANSFORMERS_IMAGES,
    ConfigKey,
    input_size,
    numbers,
    read_settings,
    refuse_other_parts,
    refuse_word,
    settings_of,
    shortest_ratio,
)
from vitpar.models.convert import Conversion, Exported, MadeTensor, Sizes
from vitpar.models.rows import Found
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.published import PUBLISHED, SIZES, fields_of

_ROPE = ("rope", "rope_temperature", "rope_grid", "rope_register_temperature")
_UNSEEN = (*_ROPE, "activation", "norm_eps")
"""Fields that no tensor shows, besides the number of heads and what is read."""
_LAYER_SCALE = 1e-5
"""Initial layer scale of imported models whose config.json has none; it does not affect imported parameters."""
EPS = {
    **{"vit": 1e-12, "vit_mae": 1e-12, "deit": 1e-12, "dinov2": 1e-6, "dinov2_with_registers": 1e-6},
    **{"dinov3_vit": 1e-5, "siglip": 1e-6, "siglip_vision_model": 1e-6},
}
"""Epsilon of LayerNorms in transformers' models whose config.json does not give one, by type of model."""
_SIZES = (*TRANSFORMERS, *TRANSFORMERS_IMAGES)
"""Settings of transformers' models of all types."""
_PLAIN = ConfigKey("hidden_act", "activation", {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}, usual="gelu")
_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "swiglu": "silu"}
"""transformers' names of activations."""
_GATES = ConfigKey("hidden_act", "activation", {"gelu": "geglu", "silu": "swiglu"}, usual="gelu")
_DINOV3 = ConfigKey("rope_theta", "rope_temperature", usual=100.0)
_ARGUMENTS = (
    *TIMM,
    *numbers(depth="depth", qk_norm="qk_norm", init_values="layer_scale"),
    *numbers(proj_drop_rate="dropout", pos_drop_rate="dropout"),
)
"""Arguments of timm's models; of these, the number of heads and what `_said_by_timm` names are read."""
_WORDS = {
    "act_layer": ("gelu", "gelu_tanh"),
    "rope_type": ("cat", "dinov3"),
    "global_pool": ("token", "avg", "map"),
}
"""Words that an argument of timm's models may have here; no tensor shows them."""


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


def said(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a config.json gives. Raises DataError for a model that vitpar cannot compute."""
    if "model_type" not in config:
        return _said_by_timm(config)
    tower = config.get("vision_config")
    config = {**config, **(tower if isinstance(tower, dict) else {}), "model_type": config["model_type"]}
    siglip = "siglip" in str(kind := config["model_type"])
    if kind not in EPS:
        refuse_word("model_type", kind, EPS)
    usual = {"hidden_act": "gelu_pytorch_tanh" if siglip else "gelu", "layer_norm_eps": EPS[kind]}
    fields = read_settings({**usual, **config}, (*_SIZES, _GATES if config.get("use_gated_mlp") else _PLAIN))
    fields |= {} if siglip else {"pool": "cls"}
    return fields | ({"rope": "dinov3", **read_settings(config, (_DINOV3,))} if kind == "dinov3_vit" else {})


def _said_by_timm(config: Mapping[str, Any]) -> dict[str, Any]:
    arguments, own = config.get("model_args"), config.get("pretrained_cfg")
    arguments, own = (x if isinstance(x, dict) else {} for x in (arguments, own))
    known = fields_of(str(config["architecture"])) or {}
    for argument, words in _WORDS.items():
        if (word := arguments.get(argument)) is not None and word not in words:
            refuse_word(argument, word, words)
    if arguments.get("pool_include_prefix"):
        raise DataError("config.json has pool_include_prefix, but vitpar's models pool over patches only")
    fields = ({"rope": "none"} if known else {}) | {name: known[name] for name in _UNSEEN if name in known}
    fields |= _rope_of_timm(arguments, known)
    if known and config.get("num_features") in (None, known["embed_dim"]):
        fields["num_heads"] = known["num_heads"]
    if pool := {"token": "cls", "avg": "avg"}.get(str(config.get("global_pool") or own.get("global_pool"))):
        fields["pool"] = pool
    given = {"num_heads": arguments.get("num_heads"), "activation": arguments.get("act_layer")}
    return fields | input_size(config) | {name: value for name, value in given.items() if value is not None}


def _rope_of_timm(arguments: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions that the arguments of timm's ``Eva`` change.

    known: fields of the architecture.
    """
    if "use_rot_pos_emb" not in arguments and "rope" not in known:
        return {}
    if arguments.get("use_rot_pos_emb") is False:
        return {"rope": "none"}
    rope = {"cat": "axial", "dinov3": "dinov3"}.get(str(arguments.get("rope_type")))
    fields: dict[str, Any] = {"rope": rope or known.get("rope", "axial")}
    if (temperature := arguments.get("rope_temperature")) is not None:
        fields["rope_temperature"] = temperature
    grid = arguments.get("ref_feat_shape")
    return fields | ({"rope_grid": grid[0]} if isinstance(grid, list) and grid else {})


def infer(size: Sizes, found: Found, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that tensors show, and those that depend on them. A model without classifier gets one class."""
    width, shown = size("embed.patch_embed.proj.weight", 0), size.of_patches()
    patch = shown["patch_size"]
    norms = (name for name in ("blocks.0.attn.q_norm.weight", "blocks.0.q_norm.weight") if name in size)
    num_heads = next((width // max(1, size(name, 0)) for name in norms), known.get("num_heads"))
    if num_heads is None:
        raise DataError(
            f"the tensors in '{size.place}' do not show the number of heads: name the model with --model"
            f"{_likely(width, patch)}, or use the folder with its config.json"
        )
    unseen = _unseen(size, found, known)
    last = found.names.get("head.norm.weight") == ("fc_norm.weight",)
    averaged = "embed.cls_token" not in size or last or known.get("pool") == "avg"
    pool = "map" if "head.attn_pool.latent" in size else "avg" if averaged else "cls"
    distilled = "embed.dist_token" in size and ("head.fc_dist.weight" in size or "head.fc.weight" not in size)
    registers = size("embed.reg_token", 1) if "embed.reg_token" in size else 0
    registers += ("embed.dist_token" in size and not distilled) + ("embed.cls_token" in size and pool != "cls")
    grid, every, learned = known.get("image_size", ViTConfig.image_size) // patch, True, "embed.pos_embed" in size
    if learned:
        prefix, positions = (pool == "cls") + distilled + registers, size("embed.pos_embed", -2)
        grid, every = _grid(size.place, positions, prefix, grid, found.format == "transformers")
    representation = "head.representation.weight"
    return {
        **shown,
        "embed_dim": width,
        "depth": found.count("blocks"),
        "num_heads": num_heads,
        "image_size": grid * patch,
        "num_classes": size("head.fc.weight", 0) if "head.fc.weight" in size else 1,
        "pool": pool,
        "num_reg_tokens": registers,
        "distillation": distilled,
        "representation_size": size(representation, 0) if representation in size else None,
        "position": "learned" if learned else "none",
        "prefix_positions": every,
        "qk_norm": any(f"blocks.0.{name}.weight" in size for name in ("attn.q_norm", "q_norm")),
        "attn_norm": "blocks.0.attn.norm.weight" in size,
        "mlp_norm": "blocks.0.mlp.norm.weight" in size,
        "fc_norm": last and pool == "avg",
        "norm": "layer" if "blocks.0.norm1.bias" in size else "rms",
        "qkv_bias": "all"
        if "blocks.0.attn.qkv.bias" in size or "blocks.0.in_proj.bias" in size
        else "qv"
        if "blocks.0.attn.q_bias" in size
        else "none",
        "layer_scale": (known.get("layer_scale") or _LAYER_SCALE) if "blocks.0.ls1.gamma" in size else None,
        "parallel_blocks": "blocks.0.in_proj.weight" in size,
        **unseen,
        **_mlp(size, found, width, unseen["activation"]),
    }


def _unseen(size: Sizes, found: Found, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that no tensor shows. Raises DataError for a model with rotary positions of unknown kind."""
    fields = {name: getattr(ViTConfig, name) for name in _UNSEEN}
    if any(name.endswith(".rope.freqs") for name in found.shapes):  # ViT-5
        fields |= {name: value for name, value in SIZES["vit5_base"].items() if name in _UNSEEN}
    fields |= {name: known[name] for name in _UNSEEN if name in known}
    if fields["rope"] != "axial":
        fields["rope_grid"] = None
    if fields["rope"] == "none":  # an architecture that has them, without them
        fields |= {name: getattr(ViTConfig, name) for name in _ROPE}
    rotated = "embed.pos_embed" not in size or "blocks.0.attn.q_bias" in size
    if found.format == "timm" and rotated and fields["rope"] == "none" and "rope" not in known:
        raise DataError(
            f"the tensors in '{size.place}' do not show their rotary positions: name the model with --model, or use "
            "the folder with its config.json"
        )
    return fields


def _likely(width: int, patch: int) -> str:
    """Return a suggestion for --model: a model of that width and patch size; empty if there is none."""
    return next((f", perhaps {name}_patch{patch}_224" for name, f in SIZES.items() if f["embed_dim"] == width), "")


def _mlp(size: Sizes, found: Found, width: int, activation: str) -> dict[str, Any]:
    """Return the fields `activation` and `mlp_hidden_dim`. activation: the one of plain MLPs, or the gated one."""
    if "blocks.0.in_proj.weight" in size:
        given = size("blocks.0.in_proj.weight", 0) - 3 * width
        size("blocks.0.out_proj.weight", 1)
        taken = sum(found.shapes[name][1] for name in found.names["blocks.0.out_proj.weight"]) - width
    else:
        given, taken = size("blocks.0.mlp.fc1.weight", 0), size("blocks.0.mlp.fc2.weight", 1)
    gated = activation if activation in GATED else "swiglu"
    plain = "gelu" if activation == gated else activation
    return {"activation": gated if given == 2 * taken else plain, "mlp_hidden_dim": taken}


def _grid(place: object, positions: int, prefix: int, wanted: int, of_class: bool) -> tuple[int, bool]:
    """Return (patches along a side of the image, whether the tokens before them have positions too).

    positions: number of positions, which may or may not include those of the tokens before the patches.
    prefix: number of tokens before the patches.
    wanted: expected side, which is preferred if both cases are possible.
    of_class: whether the class token alone may have a position, which becomes a part of it.

    Raises DataError if the patches cannot form a square.
    """
    cases = {positions - prefix: True, positions: prefix == 0}
    if of_class and prefix > 1:
        cases.setdefault(positions - 1, False)
    grids = {math.isqrt(n): every for n, every in reversed(cases.items()) if n > 0 and math.isqrt(n) ** 2 == n}
    if not grids:
        raise DataError(
            f"'{place}' has {positions:,} positions, {prefix} of them before the patches, which form no square grid: "
            "models for images that are not square cannot be imported"
        )
    grid = wanted if wanted in grids else [*grids][-1]
    return grid, grids[grid]


def exported(weights: Conversion, c: ViTConfig, format_name: str) -> Exported:
    """Return the model as `format_name` ("timm" or "transformers") has it.

    weights: conversion of the family.

    Raises DataError for parts that no model of that library has.
    """
    return (_timm if format_name == "timm" else _transformers)(weights, c)


def _parts_of_timm(c: ViTConfig) -> dict[str, Sequence[Any]]:
    """Return the values that fields of timm's model may have."""
    parts: dict[str, Sequence[Any]] = {"rope_register_temperature": [None], "activation": [*_NAMES]}
    if is_eva(c):
        own: dict[str, Sequence[Any]] = {"activation": ("gelu", "swiglu"), "norm": ["layer"], "distillation": [False]}
        return parts | own | {"pool": ("cls", "avg"), "position": ("learned", "none")}
    if c.distillation:
        parts |= {"num_reg_tokens": [0], "prefix_positions": [True], "position": ["learned"]}
    return parts | {"norm": ("layer", "rms") if c.gates == 1 else ["layer"]}


def _timm(weights: Conversion, c: ViTConfig) -> Exported:
    refuse_other_parts(c, "timm", _parts_of_timm(c))
    eva = is_eva(c)
    notes = []
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
    "vit": "ViTForImageClassification",
    "deit": "DeiTForImageClassificationWithTeacher",
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
    "dinov3_vit": "DINOv3ViTModel",
    "siglip": "SiglipForImageClassification",
    "siglip_vision_model": "SiglipVisionModel",
}
"""Classes of transformers by type of model."""
PREFIXES = {
    **{"vit": ("vit.", "encoder.layer."), "deit": ("deit.", "encoder.layer.")},
    **{"dinov2": ("", "encoder.layer."), "dinov2_with_registers": ("", "encoder.layer."), "dinov3_vit": ("", "layer.")},
    **dict.fromkeys(("siglip", "siglip_vision_model"), ("vision_model.", "encoder.layers.")),
}
"""Begin of the names of a model's tensors, and of a block's, by type of model."""


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


def _transformers(weights: Conversion, c: ViTConfig) -> Exported:
    refuse_other_parts(c, "transformers", _parts_of_transformers(c, this := kind(c)))
    start, block = PREFIXES[this]
    tensors, classifier = dict[str, MadeTensor](), dict[str, MadeTensor]()
    for name, tensor in weights.tensors(c, "transformers").items():
        if "classifier." in name:
            classifier[name] = tensor
        else:
            tensors[start + re.sub(r"^layer\.", block, name)] = tensor
    model = _MODELS[this]
    settings = {"model_type": this, "architectures": [model], **settings_of(c, _SIZES)}
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
