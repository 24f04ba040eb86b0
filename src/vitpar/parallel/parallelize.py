"""From a model and a plan to this rank's part of the parallel model: every wrapper, in order, in one place.

Order of wrapping:

1. build on meta, only the layers of this rank's stages (names of parameters are those of the whole model)
2. tensor parallel: split the parameters each layer class declares
3. compile the forward of each block
4. activation checkpoint: blocks recompute their forward in backward
5. ``fully_shard`` each layer, then the stage: sharding, mixed precision, gradient reduction (where there is any of it
   to do, see ``vitpar.parallel.data``)
6. materialise on the device and initialise from (seed, parameter name)

The optimizer is made after this, and saved weights are loaded after that.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from vitpar.models.config import ViTConfig
from vitpar.models.initial import initialise
from vitpar.models.vit import ViT
from vitpar.parallel.data import shard
from vitpar.parallel.mesh import build_mesh, data_mesh
from vitpar.parallel.model import ParallelModel
from vitpar.parallel.pipeline import stage_layers
from vitpar.parallel.precision import Precision, precision
from vitpar.parallel.tensor import apply_tensor_parallel
from vitpar.strategy import Plan, stages_of_rank


def parallelize(
    config: ViTConfig,
    plan: Plan,
    *,
    batch_size: int,
    device: torch.device,
    precision_name: str = "fp32",
    seed: int = 0,
    label_smoothing: float = 0.0,
    compile_blocks: bool = False,
) -> ParallelModel:
    """This rank's part of `config` under `plan`, initialised and ready to train.

    plan: validated against the model and `batch_size` (``vitpar.strategy.validate``). batch_size: images of a step over
    all ranks. Needs an initialised process group whose world size is the plan's; all ranks call it together.
    """
    numbers = precision(precision_name)
    mesh = build_mesh(plan, device.type)
    parts = stage_layers(config, plan)
    mine = stages_of_rank(mesh["pp"].get_local_rank(), plan)
    stages = {index: _wrapped(config, parts[index], plan, mesh, numbers, compile_blocks) for index in mine}
    for stage in stages.values():
        stage.to_empty(device=device)
        initialise(stage, seed, config)
    return ParallelModel(config, plan, mesh, stages, batch_size, device, numbers, label_smoothing)


def _wrapped(
    config: ViTConfig, names: tuple[str, ...], plan: Plan, mesh: DeviceMesh, numbers: Precision, compile_blocks: bool
) -> ViT:
    """One stage on meta with every wrapper on it."""
    with torch.device("meta"):
        stage = ViT(config, names).to(numbers.parameters)
    strategy, tensor_mesh = plan.strategy, mesh["tp"]  # one object for all layers, or the compiler tells them apart
    for name, layer in stage.layers().items():
        if strategy.degree("tp") > 1:
            apply_tensor_parallel(layer, tensor_mesh)
        if name.startswith("blocks."):
            if compile_blocks:
                layer.forward = torch.compile(layer.forward)
            if strategy.checkpoint:
                recompute_in_backward(layer)
    # Under a pipeline a gather for every micro-batch would cost more than the memory is worth.
    reshard = strategy.degree("fsdp") > 1 and plan.pipeline_degree == 1
    for name, layer in stage.layers().items():
        shard(layer, data_mesh(mesh), numbers.policy, reshard_after_forward=reshard and name != "head")
    # The stage itself must be an FSDP module too, or pipeline schedules reduce gradients once per micro-batch.
    shard(stage, data_mesh(mesh), numbers.policy, reshard_after_forward=False)
    return stage


def recompute_in_backward(layer: nn.Module) -> None:
    """Full activation checkpointing. Random numbers follow the sample's key, so no generator state has to be kept."""
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
