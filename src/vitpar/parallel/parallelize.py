"""Build this rank's part of a parallel model from a model and a plan: every wrapper, in order, in one place.

Each layer is wrapped by its own strategy, in this order:

1. Build on meta, only the layers of this rank's stages. Parameter names are those of the complete model.
2. Tensor parallelism: split what the layer class declares. Frozen parameters get no gradients from here on.
3. fp8: let the large linear layers of blocks multiply in float8. Needs the final, local weight sizes.
4. Compile the forward of each block, with everything that replaces a forward inside.
5. Activation checkpointing around the compiled forward.
6. ``fully_shard`` each layer, then the stage, if it has anything to shard or offload. Other layers get 16-bit copies of
   their parameters in each step (``vitpar.parallel.precision``), and gradient all-reduces (``vitpar.parallel.data``).
7. Redistributions where the layouts of neighbouring layers differ.
8. Materialise on the device and initialise from (seed, parameter name).

The optimizer is made after this, and saved weights are loaded after that.
"""

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from vitpar.errors import RecipeError
from vitpar.models.compiled import PACKED_ATTENTION
from vitpar.models.config import ModelConfig
from vitpar.models.initial import initialise
from vitpar.models.layers import Layer
from vitpar.models.loss import CrossEntropy, Loss
from vitpar.parallel.data import prefetch, reduce_always, shard, shard_stage
from vitpar.parallel.float8 import float8_fault, refuse_small
from vitpar.parallel.linear import compute_in_float8
from vitpar.parallel.mesh import layer_mesh, partial_group, pipeline_mesh, sharing_meshes, size, tensor_mesh
from vitpar.parallel.model import ParallelModel
from vitpar.parallel.pipeline import StageModule
from vitpar.parallel.precision import PRECISIONS, Precision, resolve_precision
from vitpar.parallel.redistribute import Redistribute
from vitpar.parallel.shared import tables
from vitpar.parallel.tensor import PartialGradient, apply_tensor_parallel
from vitpar.strategy import Plan, Strategy, image_layout, output_layout, stage_layers, stages_of_rank, token_layout
from vitpar.strategy.execution import Execution, LayerExecution
from vitpar.strategy.stages import travel_layouts
from vitpar.strategy.support import refuse_apart, refuse_clashes


def parallelize(
    config: ModelConfig, plan: Plan, execution: Execution, device: torch.device | str, loss: Loss = CrossEntropy()
) -> ParallelModel:
    """Return this rank's part of the model `config` under `plan`, initialised and ready to train.

    plan: validated against the model and the batch of `execution` (``vitpar.strategy.validate``).
    loss: loss of a step.

    Needs an initialised process group whose world size is the plan's. Collective. Raises StrategyError and RecipeError
    for settings that clash, have no effect under the plan, or cannot run on `device`.
    """
    refuse_clashes(plan, execution.precision, execution.compile)
    refuse_apart(plan, execution.communication.reduce_every_microbatch)
    return parallelize_checked(config, plan, execution, torch.device(device), loss)


def parallelize_checked(
    config: ModelConfig, plan: Plan, execution: Execution, device: torch.device, loss: Loss = CrossEntropy()
) -> ParallelModel:
    """Do as `parallelize`, with settings that have been compared with the plan (``Recipe.chosen``). Collective.

    Raises RecipeError for settings that cannot run on `device`.
    """
    strategies, executions = plan.strategies(config.layer_names), execution.layers(plan, config)
    if execution.compile:
        # A global of torch for everything compiled from here on: set it for every model, so that a model does not
        # inherit the budget of an earlier one. 1.0 is torch's default.
        budget = execution.activation_memory_budget
        torch._functorch.config.activation_memory_budget = 1.0 if budget is None else budget
        _allow_graphs(config, strategies, executions)
    precision = resolve_precision(execution.precision, execution.reduce_dtype)
    if precision.float8 and (fault := float8_fault(device)):
        raise RecipeError(f"train.precision is fp8, but {fault}: use bf16")
    if precision.float8:
        refuse_small(config, execution.fp8_min_features)
    pipe = pipeline_mesh(plan, device.type)
    meshes = {strategy: layer_mesh(plan, strategy, device.type) for strategy in plan.distinct}
    by_name = {name: meshes[strategy] for name, strategy in strategies.items()}
    # One mesh object for all layers of a strategy: for another object the compiler would make another graph.
    tensor_axes = {strategy: tensor_mesh(mesh) for strategy, mesh in meshes.items()}
    for name, mesh in by_name.items():
        if size(mesh, "j") > 1 and not executions[name].wrapped:
            partial_group(mesh)  # made here, where all ranks are: each has only the layers of its stages
    sharing = sharing_meshes(config, plan, device.type)
    parts, partial_gradients = stage_layers(config, plan), {}
    stages = {}
    for index in stages_of_rank(pipe.get_local_rank("pp"), plan):
        with torch.device("meta"):
            stage = StageModule(config, parts[index]).to(precision.parameters)
        for name, layer in stage.layers().items():
            strategy = strategies[name]
            partial_gradients[name] = _compute(
                name, layer, strategy, tensor_axes[strategy], executions[name], execution
            )
        _shard(stage, executions, by_name, precision, execution.communication.prefetch)
        _connect(stage, index, strategies, config, plan, pipe)
        _materialise(stage, executions, device)
        initialise(stage, execution.seed, config)
        stages[index] = stage
    return ParallelModel(
        config, plan, execution, executions, pipe, stages, by_name, partial_gradients, sharing, device, loss
    )


_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
SAVED = {
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten._scaled_mm.default),
    *(getattr(_aten, f"_scaled_dot_product_{kind}_attention").default for kind in ("flash", "efficient", "cudnn")),
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    PACKED_ATTENTION,
    # Collectives must be saved, or recomputation would communicate again (upstream: pytorch#166926 and torchtitan's
    # list of saved operations).
    _c10d.all_reduce.default,
    _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.wait_tensor.default,
}
"""Operations whose outputs the policy selective of activation checkpointing keeps, besides a layer's input.

All else is recomputed in backward, and everything under the policy full. Random numbers are functions of the sample's
key (``vitpar.models.keyed_random``), so no generator state is saved.
"""
GRAPHS = 8
"""Graphs of one kind of blocks under one strategy: two (training and evaluation) for each of two variants, such as
windows that are shifted or not, and as many again for batches of another size."""


def _allow_graphs(config: ModelConfig, strategies: dict[str, Strategy], executions: dict[str, LayerExecution]) -> None:
    """Raise the compiler's limit of graphs for the forward of a block, for every model compiled from here on.

    The limit (torch's default is 8) counts the graphs of a function, and all kinds of blocks share the function
    ``Block.forward``. Beyond it the compiler silently runs a block eagerly.
    """
    compiled = (name for name, layer in config.layers.items() if layer.compiled)
    kinds = {(config.layers[name].kind, strategies[name], executions[name].backward) for name in compiled}
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS * len(kinds))
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, limits.recompile_limit)


def _compute(
    name: str,
    layer: Layer,
    strategy: Strategy,
    axes: DeviceMesh | None,
    here: LayerExecution,
    execution: Execution,
) -> list[PartialGradient]:
    """Apply steps 2 to 5 to a layer, and return its partial gradients.

    axes: tensor-parallel axes of the layer's mesh, None without tensor parallelism.
    here: rules for this layer's parameters.
    """
    partial_gradients = [] if axes is None else apply_tensor_parallel(layer, strategy, axes)
    for parameter_name, parameter in layer.named_parameters():
        if f"{name}.{parameter_name}" in execution.frozen:
            parameter.requires_grad_(False)
    partial_gradients = [gradient for gradient in partial_gradients if gradient.parameter.requires_grad]
    if layer.description.is_block:
        if PRECISIONS[execution.precision].float8:
            compute_in_float8(name, layer, execution.fp8_min_features, execution.fp8_fast_accum)
        if execution.compile and layer.description.compiled:
            # Compile `forward`, not the module: fully_shard's hooks stay outside the graph, and names do not change.
            # Not dynamic: by default the second size that the compiler sees, such as that of a Swin's next stage,
            # becomes symbolic, which costs kernels their constants.
            layer.forward = torch.compile(layer.forward, dynamic=False)
    if strategy.checkpoint and here.backward != "nothing":
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if strategy.checkpoint == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        layer.forward = partial(checkpoint, layer.forward, **options)
    return partial_gradients


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def _shard(
    stage: StageModule,
    executions: dict[str, LayerExecution],
    meshes: dict[str, DeviceMesh],
    precision: Precision,
    prefetched: int | None,
) -> None:
    """Apply step 6.

    prefetched: number of layers ahead for which parameters are gathered; None for FSDP2's own prefetching.
    """
    wrapped = [(name, layer) for name, layer in stage.layers().items() if executions[name].wrapped]
    for name, layer in wrapped:
        shard(layer, meshes[name], precision.policy, executions[name], tables(layer))
    if wrapped:
        # The stage's own FSDP state holds no parameters, so the mesh of any wrapped layer serves.
        shard_stage(stage, meshes[wrapped[-1][0]], precision.policy)
        reduce_always(stage, [layer for name, layer in wrapped if executions[name].reduced == "every micro-batch"])
        backward = [layer for name, layer in wrapped if executions[name].backward != "nothing"]
        prefetch([layer for _, layer in wrapped], backward, prefetched)


def _connect(
    stage: StageModule, index: int, strategies: dict[str, Strategy], config: ModelConfig, plan: Plan, pipe: DeviceMesh
) -> None:
    """Apply step 7: redistribute from the incoming layout through those of the layers to the outgoing one."""
    me, group, travel = pipe.get_local_rank("stage"), pipe.get_group("stage"), travel_layouts(config, plan)
    layout = travel[index - 1] if index > 0 else image_layout(strategies[config.first_layer.name])
    for name in stage.layers():
        wanted = token_layout(strategies[name])
        # A group's outputs are those of all samples that it computes.
        stage.rows[name], stage.group_rows[name] = wanted[me], output_layout(strategies[name])[me]
        taken = config.layers[name].takes
        if taken is not None and layout != wanted:
            stage.before[name] = Redistribute(layout, wanted, taken.features, group)
        layout = wanted
    if index < plan.num_stages - 1 and layout != travel[index]:
        stage.after = Redistribute(layout, travel[index], config.layers[name].gives.features, group)


def _materialise(stage: StageModule, executions: dict[str, LayerExecution], device: torch.device) -> None:
    """Allocate parameters and buffers on the device, or in host memory where offloaded, without values (step 8)."""
    for name, layer in stage.layers().items():
        layer.to_empty(device=torch.device("cpu") if executions[name].offloaded else device)
        # fully_shard brings only its own parameters of offloaded layers to the device: buffers and tables stay there.
        for parameter in tables(layer):
            parameter.data = parameter.data.to(device)
        for module in layer.modules():
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else buffer.to(device)
