"""A small masked autoencoder, and its recipe to check plans with."""

from typing import Any

import torch

from vitpar import model_config, parse, validate
from vitpar.check import CheckResult, check_plan
from vitpar.models.mae.config import MAEConfig
from vitpar.training.recipe import read_recipe

SIZES: dict[str, Any] = {
    "patch_size": 4,
    "image_size": 16,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 4,
    "mlp_hidden_dim": 40,
}
DECODER: dict[str, Any] = {
    "decoder_embed_dim": 16,
    "decoder_depth": 2,
    "decoder_num_heads": 4,
    "decoder_mlp_hidden_dim": 24,
}


def mae(**options: Any) -> MAEConfig:
    """Return a small masked autoencoder."""
    config = model_config("mae_custom", **{"init": "perturbed", **SIZES, **DECODER, **options})
    assert isinstance(config, MAEConfig)
    return config


def check_mae(device: torch.device, mesh: str, plan: dict[str, Any], **settings: Any) -> CheckResult:
    """Compare a plan with one process; runs on every rank."""
    from dataclasses import replace

    given = {
        "data.path": "unused",
        "train.steps": 1,
        "train.batch_size": 8,
        "train.precision": "fp64",
        "task.name": "mae",
        "model.name": "mae_custom",
        **{f"model.{name}": value for name, value in SIZES.items()},
        "model.options": DECODER,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    recipe = read_recipe(None, given)
    config = recipe.config(1)
    valid = validate(replace(parse(mesh), **plan), config, recipe.train.batch_size)
    return check_plan(recipe, config, valid, device)
