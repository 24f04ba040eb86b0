"""Gradients of parameters that several layers share, and of tables, which every rank keeps complete.

Every layer has a tensor of its own for a shared parameter, even where one rank has several of them: tensor parallelism
makes new parameters, ``to_empty`` separates aliases, and ``fully_shard`` of two layers with one parameter raises an
error (torch 2.13) or silently separates them (torch 2.11). They start equal and get the same gradient, the sum of all
layers', so that they stay equal.

- A shared parameter: all its layers have one strategy, so that the same rank of each stage has the same shard. After
  all other reductions the gradients of these shards are added, on one rank and then between stages.
- A table, shared or not: a rank's gradient is that of its own samples and heads in its own layers. The sum over all
  layers and all ranks of the world is the gradient, whatever strategies the layers have. It stays out of
  ``fully_shard``, of 16-bit copies and of other sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vitpar.launch.world_group import all_reduce_
from vitpar.models.config import ModelConfig
from vitpar.models.layers import Layer
from vitpar.parallel.data import local_gradient


def tables(layer: Layer) -> set[nn.Parameter]:
    """Return the tables of a layer."""
    names = {name for part in layer.description.parts if part.role == "table" for name in part.parameters}
    return {parameter for name, parameter in layer.named_parameters() if name in names}


class SharedSums:
    """Sums of the gradients of shared parameters and tables, after all other reductions of a step.

    parameters: this rank's, by name.
    meshes: return value of ``vitpar.parallel.mesh.sharing_meshes``.
    frozen: names of the parameters that are not trained: a shared one in all of its layers, or in none.
    dtype: that of parameters.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, Tensor],
        meshes: Mapping[str, DeviceMesh | None],
        frozen: Iterable[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        frozen = set(frozen)
        trained = {owner: names for owner, names in config.holders.items() if owner not in frozen}
        here = {owner: [parameters[name] for name in names if name in parameters] for owner, names in trained.items()}
        self._device = device
        self._shared = [(here[owner], meshes[owner]) for owner in here if owner in meshes and here[owner]]
        # All ranks add up all tables, also those of layers that they lack: one message, equally long on all of them.
        self._tables = [here[owner] for owner in here if owner in config.tables]
        shapes = [config.shape(owner) for owner in here if owner in config.tables]
        self._zeros = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]

    def drop(self) -> None:
        """Sum nothing from here on."""
        self._shared, self._tables = [], []

    def run(self) -> None:
        """Replace the gradients by their sums. Collective."""
        for holders, mesh in self._shared:
            total = _sum(holders).to(self._device)
            if mesh is not None:
                dist.all_reduce(total, group=mesh.get_group("shared"))
            _give(holders, total)
        if not self._tables:
            return
        own = [_sum(holders) if holders else zeros for holders, zeros in zip(self._tables, self._zeros, strict=True)]
        message = torch.cat([gradient.flatten() for gradient in own])
        all_reduce_(message)
        parts = message.split([gradient.numel() for gradient in own])
        for holders, part in zip(self._tables, parts, strict=True):
            _give(holders, part)


def _sum(holders: list[Tensor]) -> Tensor:
    """Return the sum of the gradients of parameters, in memory of its own."""
    total = local_gradient(holders[0]).clone()
    for parameter in holders[1:]:
        total += local_gradient(parameter)
    return total


def _give(holders: Iterable[Tensor], total: Tensor) -> None:
    for gradient in map(local_gradient, holders):
        gradient.copy_(total.view_as(gradient))
