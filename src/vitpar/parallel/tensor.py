"""Tensor parallelism of a layer: its plan, applied by torch's ``parallelize_module``, and sums of partial gradients.

`tensor_parallel_plan` returns the dict of styles for the modules of a layer, from the table in ``vitpar.models.roles``.
Only styles split parameters or replace a module's ``forward``.

In place of torch's own styles these

- know all modes: a stock style gives one placement, which the two axes of 3d do not fit;
- compute on local tensors between explicit collectives (``vitpar.parallel.collective``). Parameters are DTensors, so
  that sharding, gradients and checkpoints know their layout; a DTensor operation would cost more host time than many of
  these products take;
- bind a method instead of hooks: compiled blocks stay one graph.

upstream: ``parallelize_module`` (torch 2.11 to 2.14) matches names as patterns and only warns of a name that fits
nothing, so names are compared before the call; it has no check of the mesh's axes, which the two axes of 3d rely on; it
drops `src_data_rank` for the key "" and writes it into the style, so these styles always slice the rank's own copy.

Gradients that are partial (``vitpar.models.roles``) are summed once per step: with those of replicas, or for layers
under ``fully_shard`` by `TensorSums`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from vitpar.errors import StrategyError
from vitpar.models.description import LayerDescription, Part
from vitpar.models.layers import Layer
from vitpar.models.lora_layers import product_name
from vitpar.models.roles import AXES, COPY, SUM, TABLE, UNSPLIT, TensorRole, chunk_range, parameter_splits, role_of
from vitpar.models.text_layers import embedded
from vitpar.parallel import collective
from vitpar.parallel.data import local_gradient
from vitpar.parallel.float8 import Fast
from vitpar.parallel.linear import column_linear, float8_linear, gathered_linear
from vitpar.sharded import to_local
from vitpar.strategy import Strategy, parse
from vitpar.text import shown

# Forwards of linear layers, norms and embeddings whose parameters were split. `TensorStyle` gives the modules
# `tensor_mesh`, the tensor-parallel axes (j, or j and k), `tensor_role`, their row of the table, and for a split
# vocabulary `first_id`, the first row of the weight that this rank has. ``vitpar.parallel.linear`` gives `float8`.


def _group(module: Any, axis: str) -> ProcessGroup:
    group: ProcessGroup = module.tensor_mesh.get_group("jk".index(axis))
    return group


def _linear(module: Any, x: Tensor) -> Tensor:
    """Compute a linear layer, and exchange what the table says before and after its product."""
    before, after = module.tensor_role.before, module.tensor_role.after
    weight, bias = to_local(module.weight), None if module.bias is None else to_local(module.bias)
    in_float8: Fast | None = getattr(module, "float8", None)
    if before is not None and before.exchange is COPY:
        return column_linear(x, weight, bias, _group(module, before.axis), in_float8)
    if before is None and after is None:
        return F.linear(x, weight, bias)
    if before is not None and before.exchange.dim is not None:
        y = gathered_linear(x, weight, None, before.exchange.dim, _group(module, before.axis), in_float8)
    else:
        if before is not None:
            x = collective.scatter_to_tp_region(x, -1, _group(module, before.axis))
        y = float8_linear(x, weight, None, in_float8) if in_float8 else F.linear(x, weight)
    if module.tensor_role.gathered is not None:
        y = collective.gather_from_tp_region(y, 0, _group(module, module.tensor_role.gathered.axis))
    if after is not None:
        into = collective.reduce_from_tp_region if after.exchange is SUM else collective.reduce_scatter_to_tp_region
        y = into(y, _group(module, after.axis))
    # The bias is never passed to a product whose output is Partial: the reduction would add it once per rank.
    return y if bias is None else y + bias


def _norm(module: Any, x: Tensor) -> Tensor:
    """Compute a LayerNorm or RMSNorm over split features."""
    before = module.tensor_role.before
    assert before is not None, "a split norm exchanges its statistics"
    bias = getattr(module, "bias", None)
    bias = None if bias is None else to_local(bias)
    return collective.split_norm(x, to_local(module.weight), bias, module.eps, _group(module, before.axis))


def _gather_pooled(module: Any, x: Tensor) -> Tensor:
    return collective.gather_from_tp_region(x, 0, _group(module, "j"))


def _vocabulary_embedding(module: Any, ids: Tensor) -> Tensor:
    """Embed token ids: each rank those of its rows, and 0 for others, which add up to the embeddings of all."""
    before, after = module.tensor_role.before, module.tensor_role.after
    assert after is not None, "the ranks' embeddings are summed"
    if before is not None:
        ids = collective.all_gather(ids.int(), 0, _group(module, before.axis))  # half of the bytes of int64
    weight, ids = to_local(module.weight), ids - module.first_id
    outside = (ids < 0) | (ids >= len(weight))
    x = embedded(ids.masked_fill(outside, 0), weight).masked_fill(outside[..., None], 0.0)
    into = collective.reduce_from_tp_region if after.exchange is SUM else collective.reduce_scatter_to_tp_region
    return into(x, _group(module, after.axis))


def _vocabulary_output(module: Any, x: Tensor) -> Tensor:
    """Compute the logits of this rank's part of the vocabulary, for all samples of the group."""
    before = module.tensor_role.before
    assert before is not None, "the gradient of the input is summed"
    weight, bias = to_local(module.weight), None if module.bias is None else to_local(module.bias)
    group, rows = _group(module, before.axis), x.flatten(0, -2)
    if before.exchange is COPY:
        logits = column_linear(rows, weight, bias, group)
    else:
        logits = gathered_linear(rows, weight, bias, 0, group)
    inner = x.shape[1:-1]
    # Independent of `logits`, as in ``vitpar.models.text_layers.TokenLogits``.
    whole: Tensor = torch.ops.aten._unsafe_view(logits, [len(logits) // inner.numel(), *inner, logits.shape[1]])
    return whole


FORWARDS = {
    **dict.fromkeys(("ColumnLinear", "RowLinear", "Linear2D", "Linear3D", "OwnFeatures"), _linear),
    "SplitNorm": _norm,
    "GatherPooled": _gather_pooled,
    "VocabularyEmbedding": _vocabulary_embedding,
    "VocabularyOutput": _vocabulary_output,
}
"""Forwards by the style's name. With other styles a module keeps its own."""


class TensorStyle(ParallelStyle):
    """Style of a module, by its row of the table, or of the parameters that belong to no module of their own.

    The mesh of ``parallelize_module`` has the tensor axes of the mode: one, or two for 3d.

    role: row of the module.
    parameters: rows of single parameters of the module, by name.
    """

    def __init__(self, mode: str, role: TensorRole | None, parameters: Mapping[str, TensorRole] = {}) -> None:
        super().__init__()
        self.mode, self.role, self.parameters = mode, role, dict(parameters)

    def __repr__(self) -> str:
        return f"{self.role.style if self.role else 'Parameters'}({self.mode})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (role := self.parameters.get(name, self.role)) is not None:
                axes = role.bias if name == "bias" and name not in self.parameters else role.weight
                _place(module, name, parameter, [axes.get(axis) for axis in AXES[self.mode]], device_mesh)
        if self.role is not None and (forward := FORWARDS.get(self.role.style)) is not None:
            module.tensor_mesh, module.tensor_role = device_mesh, self.role  # type: ignore[assignment]
            if forward is _vocabulary_embedding:
                rows = module.get_parameter("weight").shape[0]
                module.first_id = chunk_range(rows, device_mesh.size(), device_mesh.get_local_rank()).start  # type: ignore[assignment]
            # A bound method, not functools.partial: layers would hold different partial objects, and the compiler
            # would make a graph for each.
            setattr(module, product_name(module), MethodType(forward, module))
        return module


def _place(module: nn.Module, name: str, whole: nn.Parameter, dims: list[int | None], mesh: DeviceMesh) -> None:
    """Replace a parameter by its DTensor on `mesh`, if an axis splits one of its dimensions. dims: those, by axis."""
    if any(dim is not None for dim in dims):
        placements = [Replicate() if dim is None else Shard(dim % whole.dim()) for dim in dims]
        # src_data_rank=None: every rank slices its own copy, without a broadcast. It may still be on meta.
        setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None)))


def tensor_parallel_plan(
    layer: LayerDescription | Mapping[str, str | ParallelStyle], strategy: Strategy | str
) -> dict[str, ParallelStyle]:
    """Return the plan of a layer for ``parallelize_module``: styles by the module's name; "" is the layer itself.

    Modules whose role the mode leaves out are not in it, and without tp it is empty. The mesh has one axis, or two
    (j, k) under 3d.

    layer: description of a layer; or, for a module outside vitpar, the roles of its modules by name, as in
        `Layer.TENSOR_PARALLEL`. Then gradients of replicated parameters that see only a part of the batch (+sp, 3d) or
        of the heads are partial, and the caller sums them over the mesh.
    strategy: whose tensor-parallel mode decides, such as ``"tp2+sp"``.

    Raises ModelError for something that is no role, and StrategyError.

    Example: ``parallelize_module(block, mesh, tensor_parallel_plan({"fc1": "column", "fc2": "row"}, "tp2"))``
    """
    if isinstance(strategy, str):
        if not (plan := parse(strategy)).is_uniform:
            raise StrategyError(f"'{shown(strategy)}' has several strategies: name that of this layer, such as tp2")
        strategy = plan.strategy
    if not strategy.has("tp"):
        return {}
    if isinstance(layer, Mapping):
        parts: Sequence[Part] = [Part(name, role_of(role, name)) for name, role in layer.items()]
    else:
        parts = layer.parts
    modules: dict[str, TensorRole] = {}
    parameters: dict[str, dict[str, TensorRole]] = {}
    for part in parts:
        if (role := TABLE[strategy.mode].get(part.role, UNSPLIT)) == UNSPLIT:
            continue
        if "" in part.shapes:
            owner, _, attribute = part.name.rpartition(".")
            parameters.setdefault(owner, {})[attribute] = role
        else:
            modules[part.name] = role
    return {
        name: TensorStyle(strategy.mode, modules.get(name), parameters.get(name, {}))
        for name in dict.fromkeys([*modules, *parameters])
    }


@dataclass(frozen=True)
class PartialGradient:
    """Parameter whose gradient is a partial sum on each rank of a group.

    It is identified by module and name, because ``fully_shard`` replaces the parameter object.
    """

    module: nn.Module
    """Module that holds the parameter."""
    name: str
    """Name of the parameter in `module`."""
    group: ProcessGroup
    """Ranks along a tensor-parallel axis whose gradients add up to the complete one."""

    @property
    def parameter(self) -> Tensor:
        """The parameter."""
        parameter: Tensor = getattr(self.module, self.name)
        return parameter


def apply_tensor_parallel(layer: Layer, strategy: Strategy, mesh: DeviceMesh) -> list[PartialGradient]:
    """Split the parameters of `layer` in place and replace the forwards of its split modules.

    mesh: tensor-parallel axes of the layer's mesh.
    Returns the parameters whose gradients are partial; they must be summed in every step.
    """
    plan = tensor_parallel_plan(layer.description, strategy)
    modules = dict(layer.named_modules())
    assert plan.keys() <= modules.keys(), f"no modules {plan.keys() - modules.keys()}"  # torch would only warn
    parallelize_module(layer, mesh, plan, src_data_rank=None)
    for index, divided in enumerate(AXES[strategy.mode].values()):
        if divided == "features":
            layer.take_features(mesh.get_local_rank(index), mesh.size(index))
    layer.take_heads(mesh.get_local_rank(0), mesh.size(0))  # every mode splits heads over j
    partial_gradients = []
    for name, split in parameter_splits(layer.description, strategy.mode).items():
        owner, _, attribute = name.rpartition(".")
        partial_gradients += [PartialGradient(modules[owner], attribute, mesh.get_group(axis)) for axis in split.sums]
    return partial_gradients


class TensorSums:
    """Sums of partial gradients of layers under ``fully_shard``: one all-reduce per set of ranks, after backward.

    upstream: ``to_local()`` gives a gradient the placement of its parameter, so DTensor never reduces the partial
    gradient of a replicated parameter (torchtitan#1805, #2416, #2532, #3412, #4054). These sums replace that reduction,
    in one message instead of one per parameter. Those of other layers are part of the sums over replicas
    (``vitpar.parallel.data.gradient_sums``), which overlap with backward.

    Sums during backward would take a message per layer, because ``fully_shard`` reduces layer by layer. The norm of the
    gradients cannot be in the same message: it needs the sums.

    device: device that the groups communicate on. Offloaded gradients are on another one.
    """

    def __init__(self, gradients: Iterable[PartialGradient], device: torch.device) -> None:
        self._device = device
        # By ranks, not by group: layers of two meshes can have two groups of the same ranks. All ranks of a group see
        # the same layers in the same order, so they choose the same group of those.
        by_ranks: dict[tuple[int, ...], tuple[ProcessGroup, list[PartialGradient]]] = {}
        for gradient in gradients:
            ranks = tuple(get_process_group_ranks(gradient.group))
            by_ranks.setdefault(ranks, (gradient.group, []))[1].append(gradient)
        self._partial = list(by_ranks.values())
        self._running: list[tuple[Tensor, ProcessGroup, list[Tensor]]] = []

    @property
    def messages(self) -> list[tuple[ProcessGroup, int]]:
        """Process group and bytes of each all-reduce."""
        return [(group, sum(to_local(p.parameter).nbytes for p in gradients)) for group, gradients in self._partial]

    def start(self) -> None:
        """Start to sum the partial gradients.

        Call it after the step's last backward and after the reduction over data-parallel ranks: only then has `.grad`
        of a parameter under ``fully_shard`` its final value.
        """
        started: set[tuple[nn.Module, str]] = set()
        for group, partial in self._partial:
            places = {(gradient.module, gradient.name) for gradient in partial}
            if started & places:  # partial along two axes: the second sum adds up the results of the first
                self.wait()
            started |= places
            shards = [local_gradient(p.parameter) for p in partial]
            kinds = {(shard.dtype, shard.device) for shard in shards}
            # A fixed order: ranks that took a set's order could match messages of different dtypes.
            for kind in sorted(kinds, key=str):
                same = [shard for shard in shards if (shard.dtype, shard.device) == kind]
                message = torch.cat([shard.flatten() for shard in same]).to(self._device)
                self._running.append((collective.start_all_reduce(message, group), group, same))

    def wait(self) -> None:
        """Wait until the gradients are the sums."""
        for started, group, shards in self._running:
            parts = collective.finish(started, group).split([shard.numel() for shard in shards])
            torch._foreach_copy_(shards, [part.view_as(shard) for shard, part in zip(shards, parts, strict=True)])
        self._running.clear()
