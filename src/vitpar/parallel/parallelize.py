"""From a model and a plan to this rank's part of the parallel model: every wrapper, in order, in one place.

Order of wrapping, for each layer by its own strategy:

1. build on meta, only the layers of this rank's stages (names of parameters are those of the whole model)
2. tensor parallel: split what each layer class declares
3. fp8: the products of blocks in float8
4. compile the forward of each block
5. activation checkpoint: layers recompute their forward in backward
6. ``fully_shard`` each layer, then the stage, where there is anything to shard or offload; elsewhere copies in 16 bits
   are made for every step (``vitpar.parallel.narrow``), and gradients summed (``vitpar.parallel.data``)
7. redistributions where the layouts of neighbours differ
8. materialise on the device and initialise from (seed, parameter name)

The optimizer is made after this, and saved weights are loaded after that.
"""

from dataclasses import asdict

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vitpar.errors import RecipeError
from vitpar.models.config import ViTConfig
from vitpar.models.initial import initialise
from vitpar.models.vit import Block
from vitpar.parallel.checkpointing import recompute_in_backward
from vitpar.parallel.data import Communication, Sharding, prefetch, reduce_always, shard
from vitpar.parallel.float8 import compute_in_float8, float8_fault
from vitpar.parallel.mesh import layer_mesh, pipeline_mesh, tensor_mesh
from vitpar.parallel.model import ParallelModel
from vitpar.parallel.pipeline import stage_layers, travel_layouts
from vitpar.parallel.precision import Precision, precision
from vitpar.parallel.redistribute import Redistribute
from vitpar.parallel.stage import Stage
from vitpar.parallel.tensor import PartialGradient, apply_tensor_parallel
from vitpar.strategy import Plan, Strategy, image_layout, stages_of_rank, token_layout
from vitpar.strategy.layout import shards_as_fsdp
from vitpar.strategy.support import refuse_clashes, refuse_unused


def parallelize(
    config: ViTConfig,
    plan: Plan,
    *,
    batch_size: int,
    device: torch.device,
    precision_name: str = "fp32",
    reduce_dtype: str | None = None,
    seed: int = 0,
    label_smoothing: float = 0.0,
    compile_blocks: bool = False,
    activation_memory_budget: float | None = None,
    communication: Communication = Communication(),
) -> ParallelModel:
    """This rank's part of `config` under `plan`, initialised and ready to train.

    plan: validated against the model and `batch_size` (``vitpar.strategy.validate``). batch_size: images of a step over
    all ranks. precision_name, reduce_dtype: as ``vitpar.parallel.precision`` takes them. Needs an initialised process
    group whose world size is the plan's; all ranks call it together.
    """
    refuse_clashes(plan, precision_name, compile_blocks)
    refuse_unused(plan, precision_name, asdict(communication))
    if activation_memory_budget is not None:
        torch._functorch.config.activation_memory_budget = activation_memory_budget  # of all that compiles from here on
    numbers = precision(precision_name, reduce_dtype)
    if numbers.float8 and (fault := float8_fault(device)):
        raise RecipeError(f"train.precision is fp8, but {fault}: use bf16")
    pipe = pipeline_mesh(plan, device.type)
    strategies = plan.strategies(config.layer_names)
    meshes = {strategy: layer_mesh(plan, strategy, device.type) for strategy in plan.kinds}
    by_name = {name: meshes[strategy] for name, strategy in strategies.items()}
    # One object for all layers of a strategy, or the compiler tells them apart.
    tensor_axes = {strategy: tensor_mesh(mesh) for strategy, mesh in meshes.items()}
    parts, partial_gradients = stage_layers(config, plan), []
    stages = {}
    for index in stages_of_rank(pipe.get_local_rank("pp"), plan):
        with torch.device("meta"):
            stage = Stage(config, parts[index]).to(numbers.parameters)
        for name, layer in stage.layers().items():
            strategy = strategies[name]
            partial_gradients += _compute(layer, strategy, tensor_axes[strategy], numbers.float8, compile_blocks)
        _shard(stage, strategies, by_name, plan, numbers, communication)
        _connect(stage, index, strategies, config, plan, pipe)
        _materialise(stage, strategies, device)
        initialise(stage, seed, config)
        stages[index] = stage
    return ParallelModel(
        config,
        plan,
        pipe,
        stages,
        by_name,
        partial_gradients,
        bucket_cap_mb=communication.bucket_cap_mb,
        batch_size=batch_size,
        device=device,
        numbers=numbers,
        label_smoothing=label_smoothing,
        compiled=compile_blocks,
    )


def _compute(
    layer: nn.Module, strategy: Strategy, axes: DeviceMesh | None, float8: bool, compile_blocks: bool
) -> list[PartialGradient]:
    """Steps 2 to 5: how a layer computes. Returns its partial gradients."""
    found = [] if axes is None else apply_tensor_parallel(layer, strategy, axes)
    is_block = isinstance(layer, Block)
    if float8 and is_block:
        compute_in_float8(layer)
    if compile_blocks and is_block:
        layer.forward = torch.compile(layer.forward)
    if strategy.checkpoint:
        recompute_in_backward(layer, strategy.checkpoint)
    return found


def _shard(
    stage: Stage,
    strategies: dict[str, Strategy],
    meshes: dict[str, DeviceMesh],
    plan: Plan,
    numbers: Precision,
    communication: Communication,
) -> None:
    """Step 6."""
    wrapped = None
    for name, layer in stage.layers().items():
        strategy = strategies[name]
        reshard = communication.reshard_after_forward
        if reshard is None:
            # Under a pipeline a gather for every micro-batch would cost more than the memory is worth.
            reshard = plan.pp == 1 and name != "head"
        reshard = shards_as_fsdp(strategy) and reshard
        sharding = Sharding(meshes[name], numbers.policy, reshard, strategy.offload, plan.splits_backward)
        if sharding.needed:
            shard(layer, sharding)
            wrapped = sharding
    if wrapped:
        # The stage itself must be an FSDP module too, or pipeline schedules reduce gradients once per micro-batch; it
        # must not take the parameters of layers that stay plain (upstream: it fails on overlapping meshes).
        root = Sharding(wrapped.mesh, numbers.policy, reshard_after_forward=False)
        shard(stage, root, ignored=set(stage.parameters()))
        every = communication.reduce_every_microbatch
        eager = {name for name, s in strategies.items() if s.zero == 2 or (every and shards_as_fsdp(s))}
        reduce_always(stage, [layer for name, layer in stage.layers().items() if name in eager])
        if communication.prefetch is not None:
            prefetch(stage.layers().values(), communication.prefetch)


def _connect(
    stage: Stage, index: int, strategies: dict[str, Strategy], config: ViTConfig, plan: Plan, pipe: DeviceMesh
) -> None:
    """Step 7."""
    me, group, travel = pipe.get_local_rank("stage"), pipe.get_group("stage"), travel_layouts(config, plan)
    layout = travel[index - 1] if index > 0 else image_layout(strategies["stem"])
    for name in stage.layers():
        wanted = token_layout(strategies[name])
        stage.rows[name] = wanted[me]
        if name != "stem" and layout != wanted:
            stage.before[name] = Redistribute(layout, wanted, config.width, group)
        layout = wanted
    if index < plan.num_stages - 1 and layout != travel[index]:
        stage.after = Redistribute(layout, travel[index], config.width, group)


def _materialise(stage: Stage, strategies: dict[str, Strategy], device: torch.device) -> None:
    """Step 8, but for the values."""
    for name, layer in stage.layers().items():
        layer.to_empty(device=torch.device("cpu") if strategies[name].offload else device)
        for module in layer.modules():  # what is no parameter is never gathered from the host
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else buffer.to(device)
