"""Safetensors files: opened for reading, and in host memory as they will be on disk.

Training waits only while tensors are copied into it.

    8 bytes (length of the header) | header: JSON of names, dtypes, shapes and places | tensors, one after another

Source: the format of https://github.com/huggingface/safetensors. Its library writes a file from tensors that must not
change meanwhile, so it would need another copy.
"""

import json
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from vitpar.io import open_regular
from vitpar.sharded import local

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Name of each dtype in safetensors."""


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file. Raises OSError and SafetensorError."""
    open_regular(path).close()  # the library would wait for a named pipe, and call a pointer of git-lfs damaged
    return safe_open(path, framework="pt")


class SafetensorsBuffer:
    """Buffer with the bytes of a safetensors file, for tensors of given names, dtypes and shapes.

    pinned: whether to page-lock the memory, so that GPUs copy into it asynchronously.
    """

    def __init__(self, tensors: Mapping[str, tuple[torch.dtype, torch.Size]], *, pinned: bool) -> None:
        # Largest elements first, so that every tensor is aligned to the size of its elements.
        names = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
        places, begins, end = {}, dict[str, int](), 0
        for name in names:
            dtype, shape = tensors[name]
            begins[name], end = end, end + dtype.itemsize * shape.numel()
            places[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begins[name], end]}
        header = json.dumps(places, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        header = len(header).to_bytes(8, "little") + header
        self._buffer = torch.empty(len(header) + end, dtype=torch.uint8)
        self._buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._pinned = pinned and self._pin()
        self._views: dict[str, Tensor] = {}
        for name in names:
            dtype, shape = tensors[name]
            begin = len(header) + begins[name]
            self._views[name] = self._buffer[begin : begin + dtype.itemsize * shape.numel()].view(dtype).view(shape)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], names: Sequence[str]) -> Self | None:
        """Return a buffer for this rank's parts of the tensors called `names`; None if there are no names."""
        kinds = {name: (tensors[name].dtype, local(tensors[name]).shape) for name in names}
        return cls(kinds, pinned=any(local(tensors[name]).is_cuda for name in names)) if names else None

    @property
    def content(self) -> memoryview:
        """Bytes of the file, sharing memory with the buffer."""
        return self._buffer.numpy().data

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into the buffer.

        If it is pinned, copies from a GPU are asynchronous: they are complete when its current stream is.
        """
        for name, view in self._views.items():
            view.copy_(tensors[name], non_blocking=self._pinned)

    def _pin(self) -> bool:
        """Page-lock the buffer for the lifetime of this object, and return whether that was possible.

        Not ``pin_memory=True``, which allocates the next power of two.
        """
        runtime, place = torch.cuda.cudart(), self._buffer.data_ptr()
        if int(runtime.cudaHostRegister(place, self._buffer.numel(), 1)):
            with suppress(RuntimeError):  # the next CUDA operation raises the error again: consume it here
                torch.ones(1, device="cuda").add_(1)
            return False
        weakref.finalize(self, runtime.cudaHostUnregister, place)
        return True
