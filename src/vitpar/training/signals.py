"""Signals of training by group of layers: norms of gradients, and how far an update moves the weights.

A ratio of update to weight near 1e-3 is usual; far more diverges, far less does not learn. Both numbers are computed at
the steps that are logged. They travel in a message that these steps send anyway, and the host does not wait for them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from vitpar.models.config import ModelConfig
from vitpar.parallel import ParallelModel
from vitpar.training.optim.norms import ShardNorms
from vitpar.training.optim.optimizer import ShardedOptimizer

MOST_RUNS = 4
"""Groups into which the blocks of a model without named groups are divided."""
SAMPLED = 4096
"""Elements of a shard that stand for all of it in the size of an update. A copy of every weight would be exact."""


def layer_groups(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the names of the layers of each group: embed, the model's own groups or runs of blocks, and head."""
    blocks = [name for name in config.layers if name.startswith("blocks.")]
    ranges: Mapping[str, range] = config.groups
    if not ranges:
        parts = min(MOST_RUNS, len(blocks))
        ends = [len(blocks) * part // parts for part in range(parts + 1)]
        runs = [range(start, stop) for start, stop in pairwise(ends)]
        ranges = {f"blocks {run[0]}" + (f" to {run[-1]}" if len(run) > 1 else ""): run for run in runs}
    groups = {name: tuple(blocks[number] for number in run) for name, run in ranges.items()}
    return {"embed": ("embed",), **groups, "head": ("head",)}


class LayerSignals:
    """Sums of squares of gradients, updates and weights, for each group of layers.

    every: interval between the steps that have signals, in steps. The first step has them too.
    """

    def __init__(self, model: ParallelModel, optimizer: ShardedOptimizer, every: int) -> None:
        self._model, self._every = model, every
        groups = layer_groups(model.config)
        self.names = tuple(groups)
        """Names of the groups."""
        number = {layer: index for index, layers in enumerate(groups.values()) for layer in layers}
        self._group = {}
        for name in optimizer.shards:
            first, second = name.split(".", 2)[:2]  # a parameter's name begins with that of its layer
            self._group[name] = number[first if first in number else f"{first}.{second}"]
        copies = model.config.shared
        shards = {name: shard for name, shard in optimizer.shards.items() if shard.numel() and name not in copies}
        self._shards = list(shards.values())
        index, weight = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.float64)]
        parameters = optimizer.parameters
        for name, shard in shards.items():
            part = min(SAMPLED, shard.numel())
            index.append(torch.full((part,), self._group[name]))
            share = part * model.replicas(parameters[name]) / shard.numel()
            weight.append(torch.full((part,), 1 / share, dtype=torch.float64))
        self._index, self._weight = torch.cat(index).to(model.device), torch.cat(weight).to(model.device)
        self._index_of: dict[tuple[str, ...], Tensor] = {}

    def wanted(self, step: int) -> bool:
        """Return whether a step has signals. Equal on all ranks."""
        return step == 1 or step % self._every == 0

    @torch.no_grad()
    def sample(self) -> Tensor:
        """Return the sampled elements of this rank's shards of all trained parameters, in fp64."""
        if not self._shards:
            return torch.zeros(0, dtype=torch.float64, device=self._model.device)
        pieces = [shard.detach().reshape(-1)[:SAMPLED].to(self._model.device) for shard in self._shards]
        return torch.cat(pieces).double()

    @torch.no_grad()
    def sums(self, gradients: Sequence[ShardNorms], scale: float, before: Tensor) -> Tensor:
        """Return this rank's sums of squares of gradients, updates and weights, [3, groups].

        before: `sample` before the update, which is done. scale: of the loss.
        """
        sums = torch.zeros(3, len(self.names), dtype=torch.float64, device=self._model.device)
        for names, replicas, norms in gradients:
            squares = norms.to(sums.device).double().square() / (replicas * scale**2)
            sums[0].index_add_(0, self._groups_of(tuple(names)), squares)
        after = self.sample()
        sums[1].index_add_(0, self._index, (after - before).square() * self._weight)
        sums[2].index_add_(0, self._index, before.square() * self._weight)
        return sums

    def _groups_of(self, names: tuple[str, ...]) -> Tensor:
        """Return the group of each parameter. Copied to the device once: the host would wait for each copy."""
        if names not in self._index_of:
            self._index_of[names] = torch.tensor([self._group[name] for name in names], device=self._model.device)
        return self._index_of[names]

    def row(self, sums: Sequence[Sequence[float]]) -> dict[str, dict[str, float | None]]:
        """Return what the row of a step says of `sums` over all ranks. Groups without trained parameters are left out.

        A norm that is not finite is None.
        """
        gradients, updates, weights = sums
        trained = [index for index, weight in enumerate(weights) if weight > 0]
        return {
            "grad_norms": {self.names[index]: _root(gradients[index]) for index in trained},
            "update_ratios": {self.names[index]: _root(updates[index] / weights[index]) for index in trained},
        }


def _root(square: float) -> float | None:
    return float(f"{math.sqrt(square):.6g}") if math.isfinite(square) else None
