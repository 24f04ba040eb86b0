"""Names of published Vision Transformers, and what each stands for.

Names and sizes are timm's (``vision_transformer.py``, ``deit.py`` and ``eva.py``, 1.0), with these exceptions:

- 22B is from "Scaling Vision Transformers to 22 Billion Parameters" (arXiv 2302.05442).
- ViT-5 is from arXiv 2602.08071 and its code (github.com/wangf3014/ViT-5).
- DINOv3 reads the class token, as its authors and transformers do; timm averages the patches by default.
- A class token that nothing reads (EVA-02) is a register here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from braceexpand import braceexpand

Fields = Mapping[str, Any]


def _sizes(embed_dim: int, depth: int, num_heads: int, mlp_hidden_dim: int = 0, **options: Any) -> dict[str, Any]:
    hidden = mlp_hidden_dim or 4 * embed_dim
    return {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, "mlp_hidden_dim": hidden, **options}


_SIZES = {
    "nano": (96, 8, 12),  # ours: small enough for a laptop's processes, divisible enough for most plans
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "medium": (512, 12, 8),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "so400m": (1152, 27, 16, 4304),
    "huge": (1280, 32, 16),
    "giant": (1408, 40, 16, 6144),
    "giantopt": (1536, 40, 16),
    "gigantic": (1664, 48, 16, 8192),
}
"""Arguments of `_sizes` by the size's name."""


def _family(start: str, names: Iterable[str], **options: Any) -> dict[str, dict[str, Any]]:
    return {f"{start}_{name}": _sizes(*_SIZES[name], **options) for name in names}


_EVA02: dict[str, Any] = {"activation": "swiglu", "qkv_bias": "qv", "rope": "axial", "rope_grid": 16}
_EVA02 |= {"pool": "avg", "fc_norm": True, "num_reg_tokens": 1}
_VIT5: dict[str, Any] = {
    "norm": "rms",
    "qk_norm": True,
    "qkv_bias": "none",
    "num_reg_tokens": 4,
    "prefix_positions": False,
}
_VIT5 |= {"rope": "axial", "rope_register_temperature": 100.0, "layer_scale": 1e-4}
SIZES: dict[str, dict[str, Any]] = {
    **_family("vit", _SIZES),
    "vit_22b": _sizes(6144, 48, 48, qk_norm=True, norm="rms", qkv_bias="none", parallel_blocks=True, pool="map"),
    **_family("deit", ("tiny", "small", "base")),
    "deit_tiny_distilled": _sizes(192, 12, 3, distillation=True),
    "deit_small_distilled": _sizes(384, 12, 6, distillation=True),
    "deit_base_distilled": _sizes(768, 12, 12, distillation=True),
    **_family("deit3", ("small", "medium", "base", "large", "huge"), layer_scale=1e-6, prefix_positions=False),
    "eva02_tiny": _sizes(192, 12, 3, 512, mlp_norm=False, **_EVA02),
    "eva02_small": _sizes(384, 12, 6, 1024, mlp_norm=False, **_EVA02),
    "eva02_base": _sizes(768, 12, 12, 2048, mlp_norm=True, **_EVA02),
    "eva02_large": _sizes(1024, 24, 16, 2730, mlp_norm=True, **_EVA02),
    **_family("vit5", ("small", "base", "large"), **_VIT5),
    "vit5_xlarge": _sizes(1152, 28, 16, **_VIT5),
}
"""Sizes and parts by the beginning of a name."""


@dataclass(frozen=True)
class Variant:
    """Models with a word after the patch size, such as siglip in vit_base_patch16_siglip_224."""

    sizes: Mapping[str, Fields]
    """Fields of each size, by the beginning of the name; other sizes have no such model."""
    common: Fields = field(default_factory=dict)
    """Fields that all sizes have in common."""
    image_size: int | None = None
    """Image size of names that do not end in one; None if all do."""


def _alike(*sizes: str, **others: Fields) -> dict[str, Fields]:
    return {**{f"vit_{size}": {} for size in sizes}, **{f"vit_{size}": fields for size, fields in others.items()}}


_DINOV2 = _alike("small", "base", "large", giant=_sizes(1536, 40, 24, 4096, activation="swiglu"))
_DINOV3_COMMON = {
    "norm_eps": 1e-5,
    "layer_scale": 1e-5,
    "num_reg_tokens": 4,
    "position": "none",
    "rope": "dinov3",
    "rope_temperature": 100.0,
}
_DINOV3 = {
    **_alike("tiny", "small", "base", "large"),
    "vit_small_plus": _sizes(384, 12, 6, 1536, activation="swiglu"),
    "vit_huge_plus": _sizes(1280, 32, 20, 5120, activation="swiglu"),
    "vit_7b": _sizes(4096, 40, 32, 8192, activation="swiglu"),
}
_SIGLIP = _alike("base", "large", "so400m", giantopt={"activation": "gelu_tanh"})
_NO_QKV_BIAS = {"qkv_bias": "none", "layer_scale": 1e-6}
VARIANTS: dict[str, Variant] = {
    "gap": Variant(_alike("huge", "giant", medium=_NO_QKV_BIAS, base={"num_heads": 16}), {"pool": "avg"}),
    "dinov2": Variant(_DINOV2, {"layer_scale": 1e-5}, 518),
    "reg4_dinov2": Variant(_DINOV2, {"layer_scale": 1e-5, "num_reg_tokens": 4, "prefix_positions": False}, 518),
    "dinov3": Variant(_DINOV3, {**_DINOV3_COMMON, "qkv_bias": "none"}, 256),
    "dinov3_qkvb": Variant(_DINOV3, {**_DINOV3_COMMON, "qkv_bias": "qv"}, 256),
    "siglip": Variant(_SIGLIP, {"pool": "map"}),
    "siglip_gap": Variant(_SIGLIP, {"pool": "avg"}),
}
"""Variants by the words after the patch size."""
_APPROXIMATE = {
    ("vit_base", "32", "256"),
    ("vit_large", "16", "512"),
    *(("vit_so400m", "16", image) for image in ("256", "384", "512")),
}
_NAME = re.compile("([a-z0-9_]{1,30})_patch([0-9]{1,9})(?:_([a-z][a-z0-9_]{0,30}?))?(?:_([0-9]{1,9}))?")


def fields_of(name: str) -> dict[str, Any] | None:
    """Return the fields that a name stands for; None for a name that no Vision Transformer has.

    Any patch and image size is allowed. A tag of pretrained weights, which follows a dot, is ignored.
    """
    match = _NAME.fullmatch(name.partition(".")[0])
    if match is None:
        return None
    start, patch, words, image = match.groups()
    if words is None:
        if start not in SIZES or image is None:
            return None
        return {**SIZES[start], "patch_size": int(patch), "image_size": int(image)}
    variant = VARIANTS.get(words)
    if variant is None or start not in variant.sizes or (image is None and variant.image_size is None):
        return None
    size = {**SIZES.get(start, {}), **variant.sizes[start]}
    # Of SigLIP's models, those that were published with SigLIP 2 only have the approximate GELU.
    approximate = words.startswith("siglip") and (start, patch, image) in _APPROXIMATE
    return {
        **size,
        **variant.common,
        **({"activation": "gelu_tanh"} if approximate else {}),
        "patch_size": int(patch),
        "image_size": int(image) if image else variant.image_size,
    }


PUBLISHED = tuple(
    braceexpand(
        "{vit_{tiny,small,base,large}_patch{16,32}_224,vit_base_patch8_224,vit_large_patch14_224,"
        "vit_{huge,giant,gigantic,22b}_patch14_224,"
        "deit_{tiny,small,base}{,_distilled}_patch16_224,"
        "deit3_{small,base,large}_patch16_{224,384},deit3_medium_patch16_224,deit3_huge_patch14_224,"
        "vit_{small,base,large,giant}_patch14_dinov2,vit_{small,base,large,giant}_patch14_reg4_dinov2,"
        "vit_{small,small_plus,base,large,huge_plus,7b}_patch16_dinov3,"
        "vit_{tiny,small,small_plus,base,large,huge_plus}_patch16_dinov3_qkvb,"
        "eva02_{tiny,small}_patch14_{224,336},eva02_{base,large}_patch14_{224,448},"
        "vit_base_patch32_siglip_256,vit_base_patch16_siglip_{224,256,384,512},vit_large_patch16_siglip_{256,384,512},"
        "vit_so400m_patch14_siglip_{224,378},vit_so400m_patch16_siglip_{256,384,512},vit_giantopt_patch16_siglip_{256,384},"
        "vit_base_patch32_siglip_gap_256,vit_base_patch16_siglip_gap_{224,256,384,512},"
        "vit_large_patch16_siglip_gap_{256,384,512},vit_so400m_patch14_siglip_gap_{224,378},"
        "vit_so400m_patch16_siglip_gap_{256,384,512},vit_giantopt_patch16_siglip_gap_{256,384},"
        "vit_medium_patch16_gap_256,vit_base_patch16_gap_224,vit_huge_patch14_gap_224,"
        "vit5_{small,base,large,xlarge}_patch16_224}"
    )
)
"""Names that stand for a published model; any other patch and image size of a family is a name too."""
