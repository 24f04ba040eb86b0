"""Named tensors, sharded or whole, out of a checkpoint: each rank reads its own parts.

torch.distributed.checkpoint (DCP) decides which written parts a rank reads for the part that it needs. Its own storage
keeps the index as a pickle, which can run code when it is read; nothing here can.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor
from torch.futures import Future

from vitpar.checkpoint.index import Index, first_line, read_index
from vitpar.errors import CheckpointError, shown
from vitpar.files import stat_regular


@torch.no_grad()
def load_tensors(folder: Path, tensors: Mapping[str, Tensor], index: Index | None = None) -> None:
    """Fill `tensors` from `folder`, each rank its own parts, by name. Nothing is sent.

    Raises CheckpointError for what is missing, has another shape or cannot be read.
    """
    index = index or read_index(folder)
    here = {name: tensor for name, tensor in tensors.items() if part(tensor).numel()}
    for name, tensor in here.items():
        stored = index.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"'{folder}' lacks {name}: it is of another model or training")
        if stored.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} in '{folder}' has shape {list(stored.shape)} where {list(tensor.shape)} is needed"
            )
    reader, planner = (
        _Reader(folder, index),
        DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    planner.set_up_planner(here, metadata, is_coordinator=False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def part(tensor: Tensor) -> Tensor:
    """This rank's, of a DTensor; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Reader(StorageReader):
    """A storage of DCP: the parts that a rank needs."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors, held = {}, dict[MetadataIndex, str]()
        for name, stored in self._index.tensors.items():
            parts = [(torch.Size(offsets), torch.Size(sizes), shard) for shard, offsets, sizes in stored.parts]
            tensors[name] = TensorStorageMetadata(
                TensorProperties(getattr(torch, stored.dtype)),
                torch.Size(stored.shape),
                [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in parts],
            )
            held |= {MetadataIndex(name, offsets): self._index.shards[shard] for offsets, _, shard in parts}
        return Metadata(tensors, storage_data=held)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._held = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file = defaultdict(list)
        for item in plan.items:
            by_file[self._held[item.storage_index]].append(item)
        for name, items in by_file.items():
            try:
                stat_regular(self._folder / name)
                with safe_open(self._folder / name, framework="pt") as file:
                    for item in items:
                        begins = zip(item.storage_offsets, item.lengths, strict=True)
                        box = tuple(slice(begin, begin + length) for begin, length in begins)
                        stored = file.get_slice(item.storage_index.fqn)
                        target = planner.resolve_tensor(item)
                        part = stored[box] if box else file.get_tensor(item.storage_index.fqn)
                        if part.shape != target.shape:
                            raise CheckpointError(
                                f"{shown(item.storage_index.fqn)} in '{self._folder / name}' is not what was written: "
                                "use another checkpoint"
                            )
                        target.copy_(part)
                        planner.commit_tensor(item, target)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"'{self._folder / name}' cannot be read: {first_line(error)}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done
