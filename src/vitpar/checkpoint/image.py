"""A safetensors file as it will be on the disk, laid out in host memory: copying tensors into it is all that training
has to wait for.

8 bytes (length of the header) | header: JSON of names, dtypes, shapes and places | tensors, one behind the other

Source: the format of https://github.com/huggingface/safetensors. Its library writes a file from tensors that must not
change meanwhile, so it would need another copy.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

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


class SafetensorsBuffer:
    """The bytes of a file that holds tensors of these dtypes and shapes, by name.

    pinned: whether GPUs copy into it by themselves, while the host goes on.
    """

    def __init__(self, tensors: Mapping[str, tuple[torch.dtype, torch.Size]], *, pinned: bool) -> None:
        # By size of their elements, so that all begin at a multiple of it.
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
    def of(cls, tensors: Mapping[str, Tensor], names: Sequence[str]) -> SafetensorsBuffer | None:
        """Return an image for this rank's parts of the tensors called `names`; None where there are none."""
        kinds = {name: (tensors[name].dtype, local(tensors[name]).shape) for name in names}
        return cls(kinds, pinned=any(local(tensors[name]).is_cuda for name in names)) if names else None

    @property
    def content(self) -> memoryview:
        """The bytes of the file, sharing memory."""
        return self._buffer.numpy().data

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into their places; those of a GPU are there when its current stream is, if this is pinned."""
        for name, view in self._views.items():
            view.copy_(tensors[name], non_blocking=self._pinned)

    def _pin(self) -> bool:
        """Lock the memory in its place for as long as this is there; whether that could be done.

        Not ``pin_memory=True``, which takes the next power of two.
        """
        runtime, place = torch.cuda.cudart(), self._buffer.data_ptr()
        if int(runtime.cudaHostRegister(place, self._buffer.numel(), 1)):
            with suppress(RuntimeError):  # that it failed is told again by whatever is computed next
                torch.ones(1, device="cuda").add_(1)
            return False
        weakref.finalize(self, runtime.cudaHostUnregister, place)
        return True
