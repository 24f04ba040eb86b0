"""A Vision Transformer's configuration by a config.json of timm or transformers, and by the tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitpar.errors import DataError
from vitpar.models.config import GATED
from vitpar.models.convert import Sizes
from vitpar.models.rows import TRANSFORMERS_IMAGES, ConfigKey, Found, input_size, read_settings, refuse_word
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.published import SIZES, fields_of

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
_PLAIN = ConfigKey("hidden_act", "activation", {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}, usual="gelu")
_GATES = ConfigKey("hidden_act", "activation", {"gelu": "geglu", "silu": "swiglu"}, usual="gelu")
_DINOV3 = ConfigKey("rope_theta", "rope_temperature", usual=100.0)
_WORDS = {
    "act_layer": ("gelu", "gelu_tanh"),
    "rope_type": ("cat", "dinov3"),
    "global_pool": ("token", "avg", "map"),
}
"""Words that an argument of timm's models may have here; no tensor shows them."""


def said_by(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a config.json gives. Raises DataError for a model that vitpar cannot compute."""
    if "model_type" not in config:
        return _said_by_timm(config)
    tower = config.get("vision_config")
    config = {**config, **(tower if isinstance(tower, dict) else {}), "model_type": config["model_type"]}
    siglip = "siglip" in str(kind := config["model_type"])
    if kind not in EPS:
        refuse_word("model_type", kind, EPS)
    usual = {"hidden_act": "gelu_pytorch_tanh" if siglip else "gelu", "layer_norm_eps": EPS[kind]}
    activation = _GATES if config.get("use_gated_mlp") else _PLAIN
    fields = read_settings({**usual, **config}, (*TRANSFORMERS_IMAGES, activation))
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
        likely = (f", perhaps {name}_patch{patch}_224" for name, sizes in SIZES.items() if sizes["embed_dim"] == width)
        raise DataError(
            f"the tensors in '{size.place}' do not show the number of heads: name the model with --model"
            f"{next(likely, '')}, or use the folder with its config.json"
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
