"""What a rank needs besides tensors: objects of models and optimizers, buffers of process groups, gaps."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from vitpar.launch.malloc import freed_memory_given_back
from vitpar.launch.world_group import all_reduce_
from vitpar.models import model_config
from vitpar.planner.cost.held import layer_parameters
from vitpar.planner.measure.resident import Peak
from vitpar.planner.measure.steps import Training
from vitpar.strategy import parse, validate
from vitpar.training.recipe import Recipe

TINY = {"width": 16, "depth": 4, "heads": 2, "patch_size": 8, "image_size": 16, "num_classes": 2}
COPIES = 4
"""Of parameters: themselves, gradients, two moments."""


def slack(device: torch.device) -> int:
    """Bytes, in the middle of some plans on all ranks; 0 where the system does not tell. Collective, and before
    anything large was computed."""
    config, ranks = model_config("vit_custom", **TINY), dist.get_world_size()
    recipe = Recipe.model_validate({"data": {"path": "unused"}, "train": {"batch_size": 4 * ranks, "compile": False}})
    training, found = Training(recipe, config), []
    with freed_memory_given_back():
        for words in (f"dp{ranks}", f"fsdp{ranks}") if ranks > 1 else ("dp1",):
            plan = validate(parse(words), config, recipe.train.batch_size)
            training.step(plan, device)()  # what is loaded or made once does not count
            peak = Peak(device)
            step = training.step(plan, device)
            step()
            peak.forget()
            step()
            tensors = COPIES * sum(layer_parameters(config, plan).values()) * torch.float32.itemsize
            found.append(max(0, (peak.grown or 0) - tensors))
    most = torch.tensor(int(statistics.mean(found)), device=device)
    all_reduce_(most, dist.ReduceOp.MAX)
    return int(most)
