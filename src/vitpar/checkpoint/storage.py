"""Parts of tensors in safetensors files beside an index of numbers and text: a storage of
torch.distributed.checkpoint (DCP).

DCP decides which rank writes which part of a tensor that several ranks hold, and which written parts a rank reads for
the part that it needs. Its own storage keeps the index as a pickle, which can run code when it is read; nothing here
can.

    <folder>/
        index.json                            where the parts of each tensor are; size and CRC-32 of each file
        shard-00001-of-00004.safetensors      what rank 0 writes
        …                                     files of text that are given
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from vitpar.checkpoint.index import INDEX, Index, StoredFile, StoredTensor, crc32, first_line
from vitpar.errors import CheckpointError


class Writer(StorageWriter):
    """Writes a folder that is there whole or not at all: under the name ``<folder>.partial``, renamed when all ranks
    are done.

    texts: further files, by name; those of the coordinator are written. written: bytes that this rank wrote.
    """

    def __init__(self, folder: Path, texts: Mapping[str, str]) -> None:
        self._folder, self._texts = folder, texts
        self._partial = partial(folder)
        self.written = 0

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors, done = {}, Future()
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor), f"{item.index.fqn} is no tensor"
            tensors[item.index.fqn] = data.detach().cpu().contiguous()
        results = []
        if tensors:
            rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            name = f"shard-{rank + 1:05d}-of-{world:05d}.safetensors"
            stored = _written(self._partial / name, tensors)
            self.written = stored.bytes
            results = [WriteResult(item.index, stored.bytes, (name, stored)) for item in plan.items]
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        held: dict[MetadataIndex, str] = {}
        files: dict[str, StoredFile] = {}
        for result in (result for rank in results for result in rank):
            name, stored = result.storage_data
            held[result.index], files[name] = name, stored
        shards = sorted(files)
        numbers = {name: number for number, name in enumerate(shards)}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            parts = [
                (numbers[held[MetadataIndex(name, chunk.offsets)]], tuple(chunk.offsets), tuple(chunk.sizes))
                for chunk in tensor.chunks
            ]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = StoredTensor(dtype=dtype, shape=tuple(tensor.size), parts=parts)
        for name, text in self._texts.items():
            (self._partial / name).write_text(text, encoding="utf-8")
            files[name] = _synced(self._partial / name)
        index = Index(shards=shards, tensors=tensors, files=files)
        index.crc32 = index.checksum
        (self._partial / INDEX).write_text(index.model_dump_json(), encoding="utf-8")
        _synced(self._partial / INDEX)
        _sync_folder(self._partial)
        gone = removed(self._folder)
        shutil.rmtree(gone, ignore_errors=True)
        if self._folder.exists():
            os.replace(self._folder, gone)
        os.replace(self._partial, self._folder)
        _sync_folder(self._folder.parent)
        shutil.rmtree(gone, ignore_errors=True)
        metadata.state_dict_metadata.clear()  # DCP would send it to all ranks, which do not need it


class Reader(StorageReader):
    """Reads the parts that a rank needs from a folder that `Writer` wrote."""

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
                with safe_open(self._folder / name, framework="pt") as file:
                    for item in items:
                        begins = zip(item.storage_offsets, item.lengths, strict=True)
                        box = tuple(slice(begin, begin + length) for begin, length in begins)
                        stored = file.get_slice(item.storage_index.fqn)
                        target = planner.resolve_tensor(item)
                        target.copy_(stored[box] if box else file.get_tensor(item.storage_index.fqn))
                        planner.commit_tensor(item, target)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"'{self._folder / name}' cannot be read: {first_line(error)}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done


def partial(folder: Path) -> Path:
    """The name of `folder` while it is written."""
    return folder.with_name(folder.name + ".partial")


def removed(folder: Path) -> Path:
    """The name of `folder` while it is removed."""
    return folder.with_name(folder.name + ".removed")


def remove(folder: Path) -> None:
    """Remove a checkpoint, which at no time looks whole while parts of it are gone."""
    gone = removed(folder)
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _written(path: Path, tensors: dict[str, Tensor]) -> StoredFile:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # what it makes of a full disk, too
        raise OSError(first_line(error)) from None
    with suppress(OSError):  # some mounts have no modes
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody else read it
    return _synced(path)


def _synced(path: Path) -> StoredFile:
    """What `path` holds, once it is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return StoredFile(bytes=path.stat().st_size, crc32=crc32(path))


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some mounts cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
