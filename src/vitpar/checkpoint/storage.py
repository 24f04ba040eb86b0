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
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
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

from vitpar.errors import CheckpointError

INDEX = "index.json"
_CHUNK = 1 << 24


class Part(BaseModel):
    """A box of a tensor: where it begins, its shape, and the file that has it under the tensor's name."""

    model_config = ConfigDict(extra="forbid")
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


class StoredTensor(BaseModel):
    """dtype: as torch names it."""

    model_config = ConfigDict(extra="forbid")
    dtype: Literal["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"]
    shape: tuple[int, ...]
    parts: list[Part]


class StoredFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    bytes: int
    crc32: int


class Index(BaseModel):
    """What is in a folder. files: those of tensors and those of text, by name. crc32: of all the rest."""

    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = 1
    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]
    crc32: int = 0

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.model_dump_json(exclude={"crc32"}).encode())


def read_index(folder: Path) -> Index:
    """Raises CheckpointError where there is none, or one that names files outside the folder or says nonsense."""
    try:
        index = Index.model_validate_json((folder / INDEX).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"'{folder}' is no checkpoint ({INDEX} is missing): name a folder that has it") from None
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{INDEX} of '{folder}' cannot be read: {_first_line(error)}") from None
    if index.crc32 != index.checksum:
        raise CheckpointError(f"{INDEX} of '{folder}' is not what was written: use another checkpoint")
    for name in {*index.files, *(part.file for tensor in index.tensors.values() for part in tensor.parts)}:
        if Path(name).name != name or name not in index.files:
            raise CheckpointError(
                f"{INDEX} of '{folder}' names the file '{name}', which cannot be in it: do not use it"
            )
    return index


def damage(folder: Path, files: Mapping[str, StoredFile]) -> str | None:
    """The first of `files` that is not as it was written, with what is wrong; None where all are."""
    for name, known in files.items():
        try:
            size = (folder / name).stat().st_size
            if size != known.bytes:
                return f"{name} has {size:,} bytes where {known.bytes:,} were written"
            if _crc32(folder / name) != known.crc32:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


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
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            parts = [
                Part(offsets=chunk.offsets, sizes=chunk.sizes, file=held[MetadataIndex(name, chunk.offsets)])
                for chunk in tensor.chunks
            ]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = StoredTensor(dtype=dtype, shape=tuple(tensor.size), parts=parts)
        for name, text in self._texts.items():
            (self._partial / name).write_text(text, encoding="utf-8")
            files[name] = _synced(self._partial / name)
        index = Index(tensors=tensors, files=files)
        index.crc32 = index.checksum
        (self._partial / INDEX).write_text(index.model_dump_json(), encoding="utf-8")
        _synced(self._partial / INDEX)
        _sync_folder(self._partial)
        if self._folder.exists():
            remove(self._folder)
        os.replace(self._partial, self._folder)
        _sync_folder(self._folder.parent)


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
            parts = [(torch.Size(part.offsets), torch.Size(part.sizes), part.file) for part in stored.parts]
            tensors[name] = TensorStorageMetadata(
                TensorProperties(getattr(torch, stored.dtype)),
                torch.Size(stored.shape),
                [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in parts],
            )
            held |= {MetadataIndex(name, offsets): file for offsets, _, file in parts}
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
                raise CheckpointError(f"'{self._folder / name}' cannot be read: {_first_line(error)}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done


def partial(folder: Path) -> Path:
    """The name of `folder` while it is written."""
    return folder.with_name(folder.name + ".partial")


def remove(folder: Path) -> None:
    """Remove a checkpoint, which at no time looks whole while parts of it are gone."""
    gone = folder.with_name(folder.name + ".removed")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _written(path: Path, tensors: dict[str, Tensor]) -> StoredFile:
    save_file(tensors, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody else read it
    return _synced(path)


def _synced(path: Path) -> StoredFile:
    """What `path` holds, once it is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return StoredFile(bytes=path.stat().st_size, crc32=_crc32(path))


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
