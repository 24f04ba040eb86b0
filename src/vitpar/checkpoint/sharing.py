"""Division of a checkpoint's tensors among ranks: which parts each rank holds, and which rank writes a shared part.

torch.distributed.checkpoint (DCP) decides in much the same way. But DCP exchanges its plans between ranks, and stores
its index, as pickles, which can run code when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vitpar.checkpoint.index import StoredTensor
from vitpar.launch.world_group import gather_json, scatter_json
from vitpar.sharded import box_of

Held = tuple[str, str, Sequence[int], Sequence[int], Sequence[int]]
"""Part of a tensor: name, dtype and shape of the tensor; offsets and shape of the part."""


def agreed(tensors: Mapping[str, Tensor]) -> tuple[list[str], dict[str, StoredTensor]]:
    """Agree on the tensors of which this rank writes its part. Collective.

    Returns their names and, on rank 0, the index entries of all tensors; elsewhere an empty dict.
    """
    # Gathered on rank 0 only: the parts of a thousand ranks take a hundred megabytes.
    everyone = gather_json(held(tensors))
    names, stored = (None, {}) if everyone is None else divide(everyone)
    return scatter_json(names), stored


def held(tensors: Mapping[str, Tensor]) -> list[Held]:
    """Return the parts of `tensors` that this rank holds."""
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), *box_of(tensor))
        for name, tensor in tensors.items()
    ]


def divide(everyone: Sequence[Sequence[Held]]) -> tuple[list[list[str]], dict[str, StoredTensor]]:
    """Return the names of the tensors of which each rank writes its part, and the index entries of all tensors.

    everyone: the parts that each rank holds.

    Each part is written by the holder that has the fewest bytes to write so far; ties go to the lowest rank.
    """
    parts: dict[tuple[str, tuple[int, ...]], tuple[Held, list[int]]] = {}
    for rank, mine in enumerate(everyone):
        for part in mine:
            parts.setdefault((part[0], tuple(part[3])), (part, []))[1].append(rank)
    load = [0] * len(everyone)
    names: list[list[str]] = [[] for _ in everyone]
    boxes: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
    stored: dict[str, StoredTensor] = {}
    for (name, dtype, shape, begin, size), holders in parts.values():
        writer = min(holders, key=load.__getitem__)
        if name not in stored:
            stored[name] = StoredTensor.model_validate({"dtype": dtype, "shape": shape, "parts": []})
        load[writer] += math.prod(size) * getattr(torch, stored[name].dtype).itemsize
        names[writer].append(name)
        boxes.setdefault(name, []).append((writer, tuple(begin), tuple(size)))
    shards = {rank: shard for shard, rank in enumerate(rank for rank, mine in enumerate(names) if mine)}
    for name, tensor in stored.items():
        tensor.parts += [(shards[rank], begin, size) for rank, begin, size in boxes[name]]
        assert tensor.is_filled(len(shards)), f"the parts of {name} fill it"
    return names, stored


def shard_name(rank: int, world: int) -> str:
    """Return the name of the file that `rank` of `world` writes."""
    return f"shard-{rank + 1:05d}-of-{world:05d}.safetensors"
