"""Whole tensors out of a checkpoint, one at a time, by one process: for exporting and comparing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitpar.checkpoint.folder import Checkpoint
from vitpar.checkpoint.index import first_line, other_size
from vitpar.errors import CheckpointError, shown


def read_whole(checkpoint: Checkpoint, name: str) -> Tensor:
    """The tensor `name`, on the CPU. Raises CheckpointError where there is none or it cannot be read."""
    stored = checkpoint.index.tensors.get(name)
    if stored is None:
        raise CheckpointError(
            f"'{checkpoint.path}' has no tensor {shown(name)}: `vitpar checkpoint info` lists those it has"
        )
    for name_of_file in {checkpoint.index.shards[shard] for shard, _, _ in stored.parts}:
        # The index bounds what it promises by the files' sizes, so nothing is allocated that is not there.
        if wrong := other_size(checkpoint.path / name_of_file, checkpoint.index.files[name_of_file]):
            raise CheckpointError(f"the checkpoint '{checkpoint.path}' is damaged: {wrong}")
    whole = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    for shard, offsets, sizes in stored.parts:
        path = checkpoint.path / checkpoint.index.shards[shard]
        box = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        try:
            with safe_open(path, framework="pt") as file:
                whole[box] = file.get_tensor(name)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{shown(name)} cannot be read from '{path}': {first_line(error)}") from None
    return whole


@dataclass(frozen=True)
class Difference:
    """Of a tensor that two checkpoints have. largest: of the absolute differences. magnitude: the largest absolute
    value in the first; None for both where only one has it, or of another shape."""

    name: str
    largest: float | None
    magnitude: float | None


def differences(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    """Of every tensor that either has."""
    for name in first.index.tensors | second.index.tensors:
        shapes = [found.shape if (found := c.index.tensors.get(name)) else None for c in (first, second)]
        if None in shapes or shapes[0] != shapes[1]:
            yield Difference(name, None, None)
            continue
        one, other = (read_whole(checkpoint, name).double() for checkpoint in (first, second))
        if not one.numel():
            continue
        yield Difference(name, (one - other).abs().max().item(), one.abs().max().item())
