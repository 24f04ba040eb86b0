"""Tiny Vision Transformers with the parts of DeiT III, DINOv2, DINOv3, EVA-02, SigLIP, ViT-5 and ViT-22B."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitpar import model_config
from vitpar.models import ViTConfig
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel

SIZES: Mapping[str, Any] = {
    "patch_size": 2,
    "image_size": 8,
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 12,
    "mlp_hidden_dim": 96,
    "num_classes": 5,
    "init": "perturbed",
}
"""Sizes that degrees of 2, 3 and 4 divide; heads have 4 features, for rotary positions."""
DINOV3 = {"rope": "dinov3", "rope_temperature": 100.0, "position": "none", "num_reg_tokens": 4, "norm_eps": 1e-5}
EVA02 = {
    "rope": "axial",
    "rope_grid": 3,
    "qkv_bias": "qv",
    "activation": "swiglu",
    "pool": "avg",
    "fc_norm": True,
    "num_reg_tokens": 1,
}
VIT5 = {
    "norm": "rms",
    "qk_norm": True,
    "qkv_bias": "none",
    "num_reg_tokens": 4,
    "prefix_positions": False,
    "rope": "axial",
    "rope_register_temperature": 100.0,
    "layer_scale": 0.1,
}
PARTS: dict[str, dict[str, Any]] = {
    "deit3": {"layer_scale": 0.1, "prefix_positions": False},
    "dinov2": {"layer_scale": 0.1},
    "dinov2_giant_reg4": {"layer_scale": 0.1, "num_reg_tokens": 4, "prefix_positions": False, "activation": "swiglu"},
    "dinov3": {**DINOV3, "layer_scale": 0.1, "qkv_bias": "none"},
    "dinov3_qkvb": {**DINOV3, "layer_scale": 0.1, "qkv_bias": "qv"},
    "dinov3_plus": {**DINOV3, "layer_scale": 0.1, "qkv_bias": "none", "activation": "swiglu"},
    "eva02_tiny": EVA02,
    "eva02_base": {**EVA02, "mlp_norm": True},
    "eva02_clip": {**EVA02, "mlp_norm": True, "attn_norm": True},
    "siglip": {"pool": "map"},
    "siglip_reg": {"pool": "map", "num_reg_tokens": 2, "prefix_positions": False},
    "siglip2": {"pool": "map", "activation": "gelu_tanh"},
    "siglip_gap": {"pool": "avg"},
    "gap": {"pool": "avg", "qkv_bias": "none", "layer_scale": 0.1},
    "fc_norm": {"pool": "avg", "fc_norm": True, "num_reg_tokens": 2},
    "rms": {"norm": "rms", "qk_norm": True},
    "inner norms": {"attn_norm": True, "mlp_norm": True},
    "vit5": VIT5,
    "vit_22b": {"parallel_blocks": True, "norm": "rms", "qk_norm": True, "qkv_bias": "none", "pool": "map"},
    "parallel": {"parallel_blocks": True, "activation": "swiglu", "layer_scale": 0.1, "rope": "axial"},
}
"""Fields by model."""


def modern_config(parts: str, **changed: Any) -> ViTConfig:
    """Return the tiny model with the parts of `PARTS`."""
    config = model_config("vit_custom", **{**SIZES, **PARTS[parts], **changed})
    assert isinstance(config, ViTConfig)
    return config


def modern_model(config: ViTConfig) -> LayeredModel:
    """Return the model with random parameters, none of which is zero."""
    model = LayeredModel(config)
    initialise(model, 0, config)
    return model


def images(config: ViTConfig, count: int = 3, size: int | None = None) -> Tensor:
    """Return random images, float64. size: their side; None for that of the model."""
    side = size or config.image_size
    shape = (count, 3, side, side)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
