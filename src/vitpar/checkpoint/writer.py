"""Background writing of checkpoints: each rank writes its own parts of the tensors while training continues.

    <folder>/
        index.json                            where the parts of each tensor are; size and CRC-32 of each file
        shard-00001-of-00004.safetensors      written by rank 0
        …                                     text files of the caller

Training waits while its state is copied to host memory. Then a thread of each rank writes its file. It computes
checksums and waits for the disk without holding the interpreter lock, so a separate process would gain nothing. The
ranks exchange their progress in a collective that training does anyway. Once all are done, rank 0 writes the index and
renames the folder.

torch.distributed.checkpoint (DCP) divides tensors among ranks in much the same way. But DCP exchanges its plans between
ranks, and stores its index, as pickles, which can run code when they are read.
"""

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.checkpoint import atomic
from vitpar.checkpoint.image import SafetensorsBuffer
from vitpar.checkpoint.index import INDEX, Index, StoredFile, StoredTensor, damage
from vitpar.errors import CheckpointError
from vitpar.launch.world_group import all_gather_json, broadcast_json, gather_json, scatter_json
from vitpar.sharded import box_of, local
from vitpar.threads import in_background

T = TypeVar("T")
DONE, BUSY, FAILED = 0.0, 1.0, 2.0
"""State of a rank's background work. Ordered: the largest of all ranks is the worst."""
Held = tuple[str, str, Sequence[int], Sequence[int], Sequence[int]]
"""Part of a tensor: name, dtype and shape of the tensor; offsets and shape of the part."""
SEEN_S = 10.0
"""Seconds that rank 0 waits until it sees the files of all ranks."""


@dataclass(frozen=True)
class Saved:
    """Checkpoint that is complete."""

    folder: Path
    """Folder of the checkpoint."""
    seconds: float
    """Seconds from its begin to its completion."""
    bytes: int
    """Bytes of all its files except the index."""


@dataclass
class _Flight:
    """Checkpoint that is being written."""

    folder: Path
    """Final folder of the checkpoint."""
    texts: Mapping[str, str]
    """Text files by name."""
    published: Callable[[], None]
    """Called in a thread of rank 0 once the folder has its name."""
    begun: float
    """Time of its begin, by `time.monotonic`."""
    stage: Literal["writing", "publishing"] = "writing"
    """Equal on all ranks: "writing" the shards, then "publishing" the index on rank 0."""
    work: Future[Any] | None = None
    """Background work of this rank in this stage, None if it has none."""


class Writer:
    """Writer of checkpoints, one at a time. All ranks have one and call its methods together.

    Every method raises CheckpointError on all ranks if one of them cannot write.
    """

    def __init__(self) -> None:
        self._layout: dict[str, tuple[torch.dtype, torch.Size]] | None = None
        self._tensors: dict[str, StoredTensor] = {}
        self._image: SafetensorsBuffer | None = None
        self._beside: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._wait = False
        self._flight: _Flight | None = None

    def begin(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        texts: Mapping[str, str],
        published: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to write `tensors` and text files to `folder`, which is replaced atomically. Collective.

        Waits until the previous checkpoint is complete.

        tensors: by names that are the same under every plan. Ranks may have different ones. A part that several ranks
        hold is written by one of them. They must not change before `staged`.
        texts: text files by name. Those of rank 0 are written.
        published: called in a thread of rank 0 once the folder has its name.
        """
        self.finish()
        begun, wrong = time.monotonic(), None
        if dist.get_rank() == 0:
            try:
                atomic.begin(folder)
            except OSError as error:
                wrong = _cause(error)
        here = {name: tensor for name, tensor in tensors.items() if local(tensor).numel()}
        layout = {name: (tensor.dtype, local(tensor).shape) for name, tensor in here.items()}
        answers = all_gather_json((wrong, layout != self._layout))
        _raise_first(folder, [wrong for wrong, _ in answers])
        if any(changed for _, changed in answers):
            names, self._tensors = agreed(here)
            try:
                self._image = None  # free the old buffer before the new one is allocated
                self._image = SafetensorsBuffer.of(here, names)
            except RuntimeError as error:  # raised by torch when memory runs out
                wrong = _cause(error)
            _raise_first(folder, all_gather_json(wrong))
            self._layout = layout
        self._stage(here)
        self._flight = _Flight(folder, texts, published, begun)
        self._flight.work = in_background(partial(self._write, folder), "checkpoint")

    def staged(self) -> None:
        """Make the current CUDA stream wait until the tensors are copied. Call it before they change."""
        if self._wait and self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._wait = False

    @property
    def progress(self) -> float:
        """State of this rank's background work: DONE, BUSY or FAILED."""
        if self._flight is None or self._flight.work is None:
            return DONE
        if not self._flight.work.done():
            return BUSY
        return FAILED if self._flight.work.exception() else DONE

    def advance(self, worst: float) -> Saved | None:
        """Advance the checkpoint that is being written, without waiting for a disk. Collective.

        worst: the largest `progress` of all ranks.

        Returns the checkpoint once it is complete, else None.
        """
        if self._flight is None or worst == BUSY:
            return None
        if worst == FAILED or self._flight.stage == "publishing":
            return self.finish()
        self._collect()
        return None

    def finish(self) -> Saved | None:
        """Wait until the checkpoint that is being written is complete, and return it; None without one. Collective."""
        flight = self._flight
        if flight is None:
            return None
        if flight.stage == "writing":
            self._collect()
        self._flight = None
        wrong, result = broadcast_json(_outcome(flight.work))
        _raise_first(flight.folder, [wrong])
        assert result is not None, "rank 0 has published it"
        seconds, size = result
        return Saved(flight.folder, seconds, size)

    def _stage(self, tensors: Mapping[str, Tensor]) -> None:
        if self._image is None:
            return
        parts = {name: local(tensor) for name, tensor in tensors.items()}
        if not any(tensor.is_cuda for tensor in parts.values()):
            self._image.stage(parts)
            return
        self._beside = self._beside or torch.cuda.Stream()
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self._image.stage(parts)
            self._copied = self._beside.record_event()
        self._wait = True

    def _write(self, folder: Path) -> StoredFile | None:
        """Write this rank's file. Runs in the background on every rank."""
        if self._image is None:
            return None
        if self._copied is not None and self._beside is not None:
            torch.cuda.set_device(self._beside.device)  # the current device of a new thread is GPU 0
            self._copied.synchronize()
        place = atomic.partial(folder)
        place.mkdir(parents=True, exist_ok=True)  # a network mount may not show rank 0's folder yet
        return atomic.write(place / shard_name(dist.get_rank(), dist.get_world_size()), self._image.content)

    def _collect(self) -> None:
        """Wait for this rank's file, gather size and checksum of every file, and start publishing on rank 0."""
        flight = self._flight
        assert flight is not None
        wrong, stored = _outcome(flight.work)
        answers = all_gather_json((wrong, stored.model_dump() if stored else None))
        try:
            _raise_first(flight.folder, [wrong for wrong, _ in answers])
        except CheckpointError:
            self._flight = None
            raise
        flight.stage = "publishing"
        flight.work = None
        if dist.get_rank() == 0:
            files = {
                shard_name(rank, len(answers)): StoredFile(**stored)
                for rank, (_, stored) in enumerate(answers)
                if stored
            }
            flight.work = in_background(partial(self._publish, flight, files), "checkpoint")

    def _publish(self, flight: _Flight, files: dict[str, StoredFile]) -> tuple[float, int]:
        """Write the index and rename the folder. Runs in the background on rank 0.

        Returns the seconds since the checkpoint began, and the bytes of all files except the index.
        """
        place, shards = atomic.partial(flight.folder), sorted(files)
        end = time.monotonic() + SEEN_S
        while wrong := damage(place, files, only_sizes=True):  # a network mount may delay the files of other ranks
            if time.monotonic() > end:
                raise OSError(f"{wrong}; check that all machines share the folder")
            time.sleep(0.1)
        for name, text in flight.texts.items():
            files[name] = atomic.write(place / name, text.encode())
        index = Index(shards=shards, tensors=self._tensors, files=files)
        index.crc32 = index.checksum
        atomic.write(place / INDEX, index.model_dump_json().encode())
        atomic.publish(flight.folder)
        seconds = time.monotonic() - flight.begun
        with suppress(OSError):  # a failing callback does not undo the checkpoint
            flight.published()
        return seconds, sum(stored.bytes for stored in files.values())


def _outcome(work: Future[T] | None) -> tuple[str | None, T | None]:
    """Wait for `work`, and return its error message and its result; one of them is None."""
    if work is None:
        return None, None
    error = work.exception()
    return (_cause(error), None) if error else (None, work.result())


def _cause(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"


def _raise_first(folder: Path, causes: list[str | None]) -> None:
    """Raise the first rank's cause that is not None, on all ranks, and remove the partial folder."""
    for rank, cause in enumerate(causes):
        if cause is not None:
            if dist.get_rank() == 0:
                shutil.rmtree(atomic.partial(folder), ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint '{folder}' cannot be written (rank {rank}: {cause}): free disk space, raise limits "
                "(ulimit -f), or name another folder with --run-dir"
            )


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
