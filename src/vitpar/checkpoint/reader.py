"""Reading of named tensors from a checkpoint: each rank its shards, or one process global tensors."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from vitpar.checkpoint.folder import Checkpoint
from vitpar.checkpoint.image import open_safetensors
from vitpar.checkpoint.index import Index, first_line, read_index
from vitpar.errors import CheckpointError
from vitpar.sharded import box_of, local
from vitpar.text import shown

Slices = tuple[slice, ...]


@torch.no_grad()
def load_tensors(
    folder: Path, tensors: Mapping[str, Tensor], index: Index | None = None, owners: Mapping[str, str] = {}
) -> None:
    """Fill `tensors` from `folder` by name; each rank reads its own parts, without communication.

    index: of the folder; None reads it.
    owners: name in the folder of a tensor that has another one there, by its name in `tensors`.

    Raises CheckpointError for a tensor that is missing, has another shape or cannot be read.
    """
    index = index or read_index(folder)
    wanted: dict[str, list[tuple[str, Slices, Tensor]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if not local(tensor).numel():
            continue
        name = owners.get(name, name)
        stored = index.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"'{folder}' lacks {name}: use a checkpoint of the same model and recipe")
        if stored.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} in '{folder}' has shape {list(stored.shape)} but {list(tensor.shape)} is needed"
            )
        mine = box_of(tensor)
        for shard, begin, size in stored.parts:
            if shared := _overlap(mine, (begin, size)):
                here, there = shared
                wanted[index.shards[shard]].append((name, there, local(tensor)[here]))
    for file, items in wanted.items():
        _fill(folder / file, items)


def _overlap(mine: tuple[tuple[int, ...], ...], stored: tuple[tuple[int, ...], ...]) -> tuple[Slices, Slices] | None:
    """Return the overlap of two boxes (offsets and sizes), as slices of each; None if they are disjoint."""
    spans = [(max(a, b), min(a + of_a, b + of_b), a, b) for a, of_a, b, of_b in zip(*mine, *stored, strict=True)]
    if any(begin >= end for begin, end, _, _ in spans):
        return None
    here = tuple(slice(begin - a, end - a) for begin, end, a, _ in spans)
    return here, tuple(slice(begin - b, end - b) for begin, end, _, b in spans)


def _fill(path: Path, items: list[tuple[str, Slices, Tensor]]) -> None:
    """Read parts of tensors from a safetensors file. items: names, slices within stored parts, targets to fill."""
    try:
        with open_safetensors(path) as file:
            for name, there, target in items:
                part = file.get_slice(name)[there] if there else file.get_tensor(name)
                if part.shape != target.shape:
                    raise CheckpointError(f"{shown(name)} in '{path}' has a wrong checksum: use another checkpoint")
                target.copy_(part)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {first_line(error)}") from None


def read_whole(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return the global tensor `name`, on the CPU. Raises CheckpointError if it is missing or cannot be read."""
    stored = checkpoint.index.tensors.get(name)
    if stored is None:
        raise CheckpointError(
            f"'{checkpoint.path}' has no tensor {shown(name)}: `vitpar checkpoint info` lists those it has"
        )
    whole = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    load_tensors(checkpoint.path, {name: whole}, checkpoint.index)
    return whole


@dataclass(frozen=True)
class Difference:
    """Difference of a tensor between two checkpoints."""

    name: str
    """Name of the tensor."""
    largest: float | None
    """Largest absolute difference. None if only one checkpoint has the tensor, or the shapes differ."""
    magnitude: float | None
    """Largest absolute value in the first checkpoint. None in the same cases."""


def differences(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    """Yield the difference of every tensor that either checkpoint has."""
    for name in first.index.tensors | second.index.tensors:
        shapes = [stored.shape if (stored := c.index.tensors.get(name)) else None for c in (first, second)]
        if None in shapes or shapes[0] != shapes[1]:
            yield Difference(name, None, None)
            continue
        one, other = (read_whole(checkpoint, name).double() for checkpoint in (first, second))
        if not one.numel():
            continue
        yield Difference(name, (one - other).abs().max().item(), one.abs().max().item())
