"""Which part of a checkpoint's tensors a rank holds, and which rank writes a part that several hold.

That is decided much as torch.distributed.checkpoint (DCP) would. DCP itself sends its plans from rank to rank, and
keeps the index on the disk, as pickles, which can run code when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from vitpar.checkpoint.index import StoredTensor
from vitpar.launch.world_group import gather_json, scatter_json
from vitpar.sharded import box_of

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
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), *box_of(tensor))
        for name, tensor in tensors.items()
    ]


def divide(everyone: Sequence[Sequence[Held]]) -> tuple[list[list[str]], dict[str, StoredTensor]]:
    """Return which tensors each rank writes its part of, and what the index says of all. everyone: what each holds.

    Each part goes to one of those that hold it: whoever has the fewest bytes to write so far, the lowest of these.
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
        load[writer] += math.prod(size) * stored[name].width
        names[writer].append(name)
        boxes.setdefault(name, []).append((writer, tuple(begin), tuple(size)))
    shards = {rank: shard for shard, rank in enumerate(rank for rank, mine in enumerate(names) if mine)}
    for name, tensor in stored.items():
        tensor.parts += [(shards[rank], begin, size) for rank, begin, size in boxes[name]]
        assert tensor.is_filled(len(shards)), f"the parts of {name} make it up"
    return names, stored


def shard_name(rank: int, world: int) -> str:
    """The file that `rank` of `world` writes."""
    return f"shard-{rank + 1:05d}-of-{world:05d}.safetensors"
