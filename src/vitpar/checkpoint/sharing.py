"""Which rank writes which part of a checkpoint's tensors, of which several may hold the same part.

torch.distributed.checkpoint (DCP) tells what this rank holds. Who writes it is decided here, much as DCP would: its
plans go from rank to rank as pickles, which can run code when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from vitpar.checkpoint.index import StoredTensor
from vitpar.launch.world_group import gather_json, scatter_json

Held = tuple[str, str, Sequence[int], Sequence[int], Sequence[int]]
"""A part of a tensor: its name, dtype and shape; where the part begins, and the part's shape."""


def agreed(tensors: Mapping[str, Tensor]) -> tuple[list[str], dict[str, StoredTensor]]:
    """Return the names of those of `tensors` of which this rank writes its part, and, on rank 0, what the index says of
    all tensors. Collective."""
    # Rank 0 decides for all: what a thousand ranks hold is a hundred megabytes.
    everyone = gather_json(held(tensors))
    names, stored = (None, {}) if everyone is None else divide(everyone)
    return scatter_json(names), stored


def held(tensors: Mapping[str, Tensor]) -> list[Held]:
    """Return the parts of `tensors` that this rank holds."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    found: list[Held] = []
    for item in planner.create_local_plan().items:
        name, data = item.index.fqn, item.tensor_data
        assert data is not None and data.chunk is not None, f"{name} is no tensor"
        dtype = str(data.properties.dtype).removeprefix("torch.")
        found.append((name, dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
    return found


def divide(everyone: Sequence[Sequence[Held]]) -> tuple[list[list[str]], dict[str, StoredTensor]]:
    """Return which tensors each rank writes its part of, and what the index says of all. everyone: what each holds.

    Each part goes to one of those that hold it: whoever has the fewest bytes to write so far, the lowest of these.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    parts: dict[tuple[str, tuple[int, ...]], Held] = {}
    for rank, mine in enumerate(everyone):
        for part in mine:
            name, _, _, offsets, _ = part
            key = name, tuple(offsets)
            parts.setdefault(key, part)
            holders.setdefault(key, []).append(rank)
    load = [0] * len(everyone)
    names: list[list[str]] = [[] for _ in everyone]
    boxes: dict[str, list[tuple[int, Held]]] = {}
    stored: dict[str, StoredTensor] = {}
    for key, ranks in holders.items():
        name, dtype, shape, _, sizes = parts[key]
        writer = min(ranks, key=load.__getitem__)
        if name not in stored:
            kind: Any = dtype
            stored[name] = StoredTensor(dtype=kind, shape=tuple(shape), parts=[])
        load[writer] += math.prod(sizes) * stored[name].width
        names[writer].append(name)
        boxes.setdefault(name, []).append((writer, parts[key]))
    shards = {rank: shard for shard, rank in enumerate(rank for rank, mine in enumerate(names) if mine)}
    for name, tensor in stored.items():
        tensor.parts += [(shards[rank], tuple(begin), tuple(size)) for rank, (*_, begin, size) in boxes[name]]
        assert tensor.is_filled(len(shards)), f"the parts of {name} make it up"
    return names, stored


def shard_name(rank: int, world: int) -> str:
    """The file that `rank` of `world` writes."""
    return f"shard-{rank + 1:05d}-of-{world:05d}.safetensors"
