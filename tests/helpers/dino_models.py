"""A small model for self-distillation, and its recipe to check plans with."""

from typing import Any

from vitpar import model_config
from vitpar.models.dino.config import DINOConfig

SIZES: dict[str, Any] = {"image_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 4}
"""Sizes of the backbone."""
CROPS: dict[str, Any] = {"local_crops": 3, "local_size": 8, "head_hidden_dim": 20, "head_bottleneck_dim": 12}
"""Crops and heads."""
PROTOTYPES = 100
SETTINGS: dict[str, Any] = {
    "task.name": "dino",
    "task.options": {"prototypes": PROTOTYPES, "koleo_group": 2},
    "model.name": "dino_vit_custom",
    **{f"model.{key}": value for key, value in SIZES.items()},
    "model.options": CROPS,
    "train.ema_decay": 0.9,
}
"""Settings of a recipe."""


def dino(**options: Any) -> DINOConfig:
    """Return a small model."""
    given = {"init": "perturbed", "num_classes": PROTOTYPES, **SIZES, **CROPS, **options}
    config = model_config("dino_vit_custom", **given)
    assert isinstance(config, DINOConfig)
    return config
