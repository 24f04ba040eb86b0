"""Simulate a CUDA device: its tensors have a shape, dtype and device but no values; host tensors are real.

An operation that mixes host and device tensors raises, as does one whose output shape depends on values. On request,
everything that makes the host wait for the device raises too: reading a value, a blocking copy, synchronising a stream,
an event or the device.

The patches to torch are permanent, so use a separate process that starts with ``bench.simulated_gpu.library.load``.
``torch.compile`` does not work inside: the compiler uses its own fake tensors (`bench.dry` compiles).
"""

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from bench.simulated_gpu.gpus import GPUS
from bench.simulated_gpu.torch_cuda import report

HOST, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default)
NO_META_KERNEL = (aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr)
"""In-place operations without a meta kernel in torch; they return nothing, so they can be skipped."""

TRITON = ("vitpar::adamw_",)
"""In-place operations whose body starts a Triton kernel, which takes addresses; they return nothing."""


class Synchronisation(RuntimeError):
    """Error: the host waited for the device."""


class DeviceMismatch(RuntimeError):
    """Error: an operation was given tensors of host and device."""


class FakeCuda(FakeTensorMode):
    """Mode that provides the simulated device inside a ``with`` block.

    library: the return value of ``library.load``
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        _patch()
        super().__init__(allow_non_fake_inputs=True)
        self._library, self._waits_left = library, math.inf
        torch.cuda.synchronize = lambda device=None: self._wait("torch.cuda.synchronize")

    @contextmanager
    def host_waits_at_most(self, times: float) -> Iterator[None]:
        """Raise Synchronisation when the host waits for the device more than `times` times inside the ``with`` block.

        Streams and events may be synchronised unless `times` is 0. Outside the block the host may wait, and every value
        that it reads is 1.
        """
        self._waits_left = times
        self._library.let_host_wait(ctypes.c_bool(times > 0))
        try:
            yield
        finally:
            self._waits_left = math.inf
            self._library.let_host_wait(ctypes.c_bool(True))

    def _wait(self, what: str) -> None:
        self._waits_left -= 1
        if self._waits_left < 0:
            raise Synchronisation(f"the host waits for the device in {what}")

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        to_device = any(isinstance(leaf, torch.device) and leaf.type == DEVICE.type for leaf in leaves)
        if not to_device and all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors):
            return func(*args, **kwargs)  # host tensors only: compute for real
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            return NotImplemented  # DTensor dispatches again on its local tensor
        if func is aten._local_scalar_dense.default:
            self._wait("reading a value")
            return torch.ones((), dtype=args[0].dtype).item()
        if func is aten.record_stream.default:
            return None
        if func.name() in TRITON:
            if len(devices := {tensor.device for tensor in tensors}) > 1:
                raise DeviceMismatch(f"{func} was given tensors on {' and '.join(sorted(map(str, devices)))}")
            return None
        if func.namespace == "vitpar":
            # The fake of a custom operation only describes its output: a mismatch would be in its body.
            with self:
                return OPDEFS[func.name().split(".")[0]]._init_fn(*args, **kwargs)
        for together in _together(func, tensors, args):
            devices = {tensor.device for tensor in together}
            if len(devices) > 1:
                where = " and ".join(sorted(map(str, devices)))
                raise DeviceMismatch(f"{func} was given tensors on {where}: move them to one device")
        if func in NO_META_KERNEL:
            return None
        if _blocks(func, args, kwargs):
            self._wait(f"{func}: make the copy non_blocking, or the tensor on the device")
        # Tensors on the host are real, so a copy from the device becomes zeros.
        if func is aten.copy_.default and args[0].device == HOST:
            return args[0].zero_()
        if func is aten._to_copy.default and kwargs.get("device") == HOST:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _together(func: Any, tensors: Sequence[Tensor], args: Sequence[Any]) -> Iterable[Sequence[Tensor]]:
    """Return the groups of tensors that must be on one device.

    Fake tensors accept 0-dim host tensors in every operation; CUDA accepts them in pointwise operations only.
    """
    if func in COPIES or torch.Tag.pointwise in func.tags:
        return []
    if func.name().startswith("aten::_foreach_"):  # torch falls back to one tensor at a time where devices differ
        lists = [arg for arg in args if isinstance(arg, list) and arg and isinstance(arg[0], Tensor)]
        return zip(*lists, strict=True)
    return [tensors]


def _blocks(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether `func` is a copy between host and device that the host waits for."""
    if func is aten._to_copy.default:
        pairs = [(kwargs.get("device") or args[0].device, args[0].device)]
    elif func is aten.copy_.default:
        pairs = [(args[0].device, args[1].device)]
    elif func is aten._foreach_copy_.default:
        pairs = [(target.device, source.device) for target, source in zip(args[0], args[1], strict=True)]
    else:
        return False
    non_blocking = kwargs.get("non_blocking") or args[2:3] == (True,)
    return not non_blocking and any({a.type, b.type} == {HOST.type, DEVICE.type} for a, b in pairs)


def _patch() -> None:
    """Make ``torch.cuda`` report the device."""
    report(GPUS["H200"])
    cuda: Any = torch.cuda
    cuda.Stream = lambda device=None, priority=0: torch.Stream(device=DEVICE, priority=priority)
    cuda.Event = lambda enable_timing=False, **_: torch.Event(device=DEVICE, enable_timing=enable_timing)
    tensor = cast(Any, Tensor)
    tensor.pin_memory = lambda self, device=None: self.clone()
    tensor.is_pinned = lambda self, device=None: self.device.type == "cpu"
