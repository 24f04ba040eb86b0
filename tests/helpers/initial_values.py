"""Bitwise fingerprints of initial parameter values."""

import hashlib

import torch

from vitpar import model_config
from vitpar.models.initial import initial_value


def fingerprints() -> dict[str, str]:
    """Return a digest of one tensor per kind of distribution: constant, uniform, normal and truncated normal."""
    config = model_config("vit_custom", image_size=8, patch_size=4, embed_dim=192, depth=1, num_heads=3, num_classes=20)
    names = ("blocks.0.norm1.weight", "blocks.0.mlp.fc2.weight", "embed.pos_embed", "embed.patch_embed.proj.weight")
    values = {name: initial_value(name, torch.Size((100, 101)), 7, config) for name in names}
    return {name: hashlib.blake2b(v.numpy().tobytes(), digest_size=8).hexdigest() for name, v in values.items()}
