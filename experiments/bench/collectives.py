"""Counts what a rank receives through functional collectives of some groups."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitpar.strategy.traffic import Collective

_ops = torch.ops._c10d_functional
OPERATIONS = {
    _ops.all_reduce.default: "all_reduce",
    _ops.all_gather_into_tensor.default: "all_gather",
    _ops.reduce_scatter_tensor.default: "reduce_scatter",
}


class Received(TorchDispatchMode):
    """Adds up, inside the ``with``, in `elements` what ring algorithms let this rank receive. groups: names."""

    def __init__(self, groups: Collection[str]) -> None:
        super().__init__()
        self._groups, self.elements = groups, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in OPERATIONS and args[-1] in self._groups:
            name = OPERATIONS[func]
            whole = out if name == "all_gather" else args[0]
            size = torch.distributed.distributed_c10d._resolve_process_group(args[-1]).size()
            self.elements += Collective(name, "", size, whole.numel()).received
        return out
