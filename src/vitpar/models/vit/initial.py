"""Initial values of Vision Transformers, by scheme."""

import torch
from torch import Tensor

from vitpar.models.config import Rules
from vitpar.models.initial import constant, lecun_normal, normal, patch_convolution, xavier_uniform
from vitpar.models.vit.config import ViTConfig


def _layer_scale(v: Tensor, shape: torch.Size, c: ViTConfig) -> Tensor:
    return torch.full_like(v, c.layer_scale or 0.0)


def _perturbed_layer_scale(v: Tensor, shape: torch.Size, c: ViTConfig) -> Tensor:
    return normal(0.1, mean=1.0)(v, shape, c).mul_(c.layer_scale or 0.0)


def _latent(v: Tensor, shape: torch.Size, c: ViTConfig) -> Tensor:
    return normal(c.embed_dim**-0.5)(v, shape, c)


# timm's trunc_normal_ cuts at ±2, which is 100 deviations here: it cuts nothing off.
_TIMM_FOR_ALL: Rules = (
    ("*norm*.weight", constant(1.0)),
    ("*norm*.bias", constant(0.0)),
    ("*.gamma", _layer_scale),
    ("embed.pos_embed", normal(0.02)),
    ("embed.dist_token", normal(0.02)),
    ("*_token", normal(1e-6)),
    ("*_bias", constant(0.0)),
    ("head.attn_pool.latent", _latent),
)

SCHEMES: dict[str, Rules] = {
    "jax": (
        *_TIMM_FOR_ALL,
        ("embed.patch_embed.proj.weight", lecun_normal),
        ("head.representation.weight", lecun_normal),
        ("head.attn_pool.*.weight", xavier_uniform()),
        ("head.*.weight", constant(0.0)),
        ("*.mlp.*.bias", normal(1e-6)),
        ("*.bias", constant(0.0)),
        ("*.weight", xavier_uniform()),
    ),
    "timm": (
        *_TIMM_FOR_ALL,
        ("embed.patch_embed.proj.*", patch_convolution),
        ("*.bias", constant(0.0)),
        ("*.weight", normal(0.02)),
    ),
    "moco": (
        *_TIMM_FOR_ALL,
        ("embed.patch_embed.proj.*", patch_convolution),
        ("*.bias", constant(0.0)),
        ("*.qkv.weight", xavier_uniform(parts=3)),
        ("*.weight", xavier_uniform()),
    ),
    # A classifier of zeros stops all other gradients: what compares plans starts where every parameter has one.
    "perturbed": (
        ("*norm*.weight", normal(0.1, mean=1.0)),
        ("*.gamma", _perturbed_layer_scale),
        ("embed.pos_embed", normal(0.02)),
        ("*_token", normal(0.05)),
        ("*.latent", normal(0.05)),
        ("*bias", normal(0.05)),
        ("blocks.*.weight", xavier_uniform()),
        ("*.weight", lecun_normal),
    ),
}
"""The rules of each scheme, as timm's ``weight_init`` (docs/models.md); "perturbed" is vitpar's, for tests."""
