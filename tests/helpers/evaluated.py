"""A small model with initial values under any plan, to be evaluated."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from helpers.small_data import CLASSES
from vitpar import ViTConfig, model_config, parse, validate
from vitpar.parallel import Execution, ParallelModel, parallelize
from vitpar.tasks import task_of
from vitpar.tasks.image_input import ImageInput
from vitpar.training.recipe import read_recipe

# 17 images make two full batches and one image, so the second of two ranks sees only padding.
BATCH = 8
INTERLEAVED = {"schedule": "interleaved1f1b", "virtual_stages": 2}
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("dp1", {}),
    ("dp1", {"microbatches": 4}),
    ("dp2", {}),
    ("fsdp2", {}),
    ("tp2", {}),
    ("pp2", {}),
    ("pp2", INTERLEAVED),
    ("pp2xdp2", {"microbatches": 2}),
]

SEED = 1
"""Seed whose initial parameters classify at least one image of each split correctly, with every torch version."""


def config_of() -> ViTConfig:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 2, "dropout": 0.2}
    return model_config("vit_custom", num_classes=CLASSES, init="perturbed", **sizes)


def built(
    device: torch.device, data: Path, mesh: str, fields: dict[str, Any], bad_sample: str
) -> tuple[ParallelModel, ImageInput]:
    """Return the model under a plan and its input; runs on every rank."""
    config = config_of()
    plan = validate(replace(parse(mesh), **fields), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, seed=SEED), device)
    options = {"data.path": str(data), "data.bad_sample": bad_sample, "data.crop_pct": 1.0, "data.workers": 0}
    recipe = read_recipe(None, {**options, "train.steps": 1, "train.batch_size": BATCH})
    return model, ImageInput(recipe, model, task_of(recipe, CLASSES))
