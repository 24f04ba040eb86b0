"""Named tensors, sharded or whole, to a checkpoint and back: each rank writes and reads its own parts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import DTensor

from vitpar.checkpoint.index import Index, read_index
from vitpar.checkpoint.storage import Reader, Writer, partial
from vitpar.errors import CheckpointError


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> int:
    """Write `tensors` and files of text to `folder`, replacing it; it is there whole or not at all. Collective.

    tensors: by names that are the same under every plan; ranks may have different ones, and parts that several have
    are written by one of them. texts: those of rank 0 are written. Returns the bytes this rank wrote. Raises
    CheckpointError on every rank if one fails.
    """
    writer = Writer(folder, texts)
    here = {name: tensor for name, tensor in tensors.items() if _part(tensor).numel()}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.save(here, storage_writer=writer, planner=planner)
    except dcp.api.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if dist.get_rank() == 0:
            shutil.rmtree(partial(folder), ignore_errors=True)
        if not isinstance(cause, OSError):
            raise cause from None
        raise CheckpointError(
            f"the checkpoint '{folder}' cannot be written (rank {rank}: {cause.strerror or cause}): make room or name "
            "another place with --run-dir"
        ) from None
    return writer.written


@torch.no_grad()
def load_tensors(folder: Path, tensors: Mapping[str, Tensor], index: Index | None = None) -> None:
    """Fill `tensors` from `folder`, each rank its own parts, by name. Nothing is sent.

    Raises CheckpointError for what is missing, has another shape or cannot be read.
    """
    index = index or read_index(folder)
    here = {name: tensor for name, tensor in tensors.items() if _part(tensor).numel()}
    for name, tensor in here.items():
        stored = index.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"'{folder}' lacks {name}: it is of another model or training")
        if stored.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} in '{folder}' has shape {list(stored.shape)} where {list(tensor.shape)} is needed"
            )
    reader, planner = Reader(folder, index), DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    planner.set_up_planner(here, metadata, is_coordinator=False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _part(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
