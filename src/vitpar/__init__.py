"""vitpar: train Vision Transformers on any mesh of devices in pure PyTorch.

    summary = vitpar.train("digits", {"data.path": "data_shards/digits", "train.epochs": 2}, run_dir="runs/first")
    run = vitpar.Run("runs/first")
    model = vitpar.create_model(weights=run.weights, num_classes=3)  # a plain nn.Module on one device

Under any plan, in a process group of 4 ranks::

    config = vitpar.model_config("vit_tiny_patch8_32", num_heads=4, num_classes=10)
    plan = vitpar.validate(vitpar.parse("tp2xfsdp2"), config, batch_size=64)
    model = vitpar.parallelize(config, plan, vitpar.Execution(64), "cpu")
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))  # the same on every rank
    part = model.forward_backward(images[model.image_rows(64)], labels)
    loss = model.global_loss(part)  # the mean over the batch, equal on all ranks

Importing vitpar does not import torch: what needs torch is loaded when it is first named.
"""

import importlib
from typing import TYPE_CHECKING, Any

from vitpar.errors import UserError
from vitpar.models import BertConfig, InputSpec, ModelConfig, SideInput, SwinConfig, T5Config, ViTConfig, model_config
from vitpar.strategy import Execution, Plan, Strategy, parse, validate
from vitpar.tasks.task import LabelSet, Metric, Task

if TYPE_CHECKING:
    from vitpar.check import check_plan
    from vitpar.models.layers import Layer, LayeredModel
    from vitpar.models.own import OwnModel, register
    from vitpar.parallel.model import ParallelModel
    from vitpar.parallel.parallelize import parallelize
    from vitpar.parallel.tensor import tensor_parallel_plan
    from vitpar.planner.automatic import search
    from vitpar.recipe import Recipe, read_recipe
    from vitpar.runs.run import Run
    from vitpar.sharded import to_local
    from vitpar.training.begin import create_model
    from vitpar.training.train import train
    from vitpar.training.trainer import Trainer
    from vitpar.weights.folder import load_weights, save_weights

__version__ = "0.1.0"
_PLACES = {
    **dict.fromkeys(("Layer", "LayeredModel"), "vitpar.models.layers"),
    **dict.fromkeys(("OwnModel", "register"), "vitpar.models.own"),
    **dict.fromkeys(("load_weights", "save_weights"), "vitpar.weights.folder"),
    **dict.fromkeys(("Recipe", "read_recipe"), "vitpar.recipe"),
    "ParallelModel": "vitpar.parallel.model",
    "Run": "vitpar.runs.run",
    "Trainer": "vitpar.training.trainer",
    "check_plan": "vitpar.check.plan",
    "create_model": "vitpar.training.begin",
    "parallelize": "vitpar.parallel.parallelize",
    "search": "vitpar.planner.automatic",
    "tensor_parallel_plan": "vitpar.parallel.tensor",
    "to_local": "vitpar.sharded",
    "train": "vitpar.training.train",
}
"""Modules of the names that are loaded when they are first used, since they import torch."""
__all__ = [
    "BertConfig",
    "Execution",
    "InputSpec",
    "LabelSet",
    "Layer",
    "LayeredModel",
    "Metric",
    "ModelConfig",
    "OwnModel",
    "ParallelModel",
    "Plan",
    "Recipe",
    "Run",
    "SideInput",
    "Strategy",
    "SwinConfig",
    "T5Config",
    "Task",
    "Trainer",
    "UserError",
    "ViTConfig",
    "__version__",
    "check_plan",
    "create_model",
    "load_weights",
    "model_config",
    "parallelize",
    "parse",
    "read_recipe",
    "register",
    "save_weights",
    "search",
    "tensor_parallel_plan",
    "to_local",
    "train",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'vitpar' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the public names, also those that are not loaded yet."""
    return __all__
