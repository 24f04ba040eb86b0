"""Count or list a rank's collectives and point-to-point operations, by a short name."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitpar.parallel.data import GradientSum

NAMES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}
"""Short names of torch.distributed's operations and of the functional ones that DTensor calls. Others keep theirs."""
WHOLES = {
    "c10d::allreduce_": 0,
    "c10d::_allgather_base_": 0,
    "c10d::_reduce_scatter_base_": 1,
    "_c10d_functional::all_reduce": 0,
    "_c10d_functional::all_gather_into_tensor": None,
    "_c10d_functional::reduce_scatter_tensor": 0,
}
"""Index of the argument that holds the complete tensor of the collective; None if the result holds it."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution_backward")
"""Operations of a matrix product, in forward or in backward."""
_NO_TRAFFIC = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")


class Sent(TorchDispatchMode):
    """Counter of this rank's communication inside a ``with`` block.

    counts: number of operations, by short name
    sizes: functional collectives by (name, group, elements of the complete tensor)
    bytes: bytes of the complete tensors, for the operations in `WHOLES`

    torch's CommDebugMode does not count point-to-point operations, and cannot be entered around a pipeline schedule: in
    torch 2.13 its module tracking raises `list index out of range`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sizes: Counter[tuple[str, str, int]] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches again on its local tensors, and the collectives arrive then
        out = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload):
            name = func._schema.name
            if name.partition("::")[0] in ("c10d", "_c10d_functional") and name not in _NO_TRAFFIC:
                self.counts[NAMES.get(name, name)] += 1
                if name in WHOLES:
                    wholes = out if WHOLES[name] is None else args[WHOLES[name]]
                    for whole in wholes if isinstance(wholes, list | tuple) else [wholes]:
                        self.bytes[NAMES[name]] += whole.nbytes
                if name.startswith("_c10d_functional::"):
                    whole = out if NAMES.get(name) == "all_gather" else args[0]
                    self.sizes[NAMES.get(name, name), args[-1], whole.numel()] += 1
        return out


class Events(TorchDispatchMode):
    """Recorder of a step: matrix products, starts of collectives as "name ranks", and waits for gradient sums."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name
        if name in PRODUCTS:
            self.names.append("product")
        elif name == "_c10d_functional::wait_tensor":
            self.names.append("wait")
        elif name in NAMES:
            self.names.append(f"{NAMES[name]} {_ranks(args)}")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def noting_waits(self) -> Iterator[None]:
        """Record `GradientSum.wait`, too."""
        wait = GradientSum.wait

        def noted(total: GradientSum) -> None:
            self.names.append("wait")
            wait(total)

        with mock.patch.object(GradientSum, "wait", noted):
            yield


def _ranks(args: Any) -> int:
    if isinstance(args[-1], str):
        return _resolve_process_group(args[-1]).size()
    groups = (arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
    return ProcessGroup.unbox(next(groups)).size()
