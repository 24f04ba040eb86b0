"""Counter of the elements that a rank receives in collectives."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitpar.strategy.traffic import Collective

NAMES = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


class Received(TorchDispatchMode):
    """Context manager that counts the elements which this rank receives, assuming ring algorithms.

    activations: received in functional collectives, which the layers use. weights: parameters and gradients, received
    in the in-place collectives of c10d, which ``fully_shard`` uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.activations = self.weights = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches again with local tensors and the collectives it needs
        out = func(*args, **(kwargs or {}))
        library, _, name = func._schema.name.partition("::") if hasattr(func, "_schema") else ("", "", "")
        if library == "_c10d_functional" and name in NAMES:
            whole = out if name == "all_gather_into_tensor" else args[0]
            ranks = torch.distributed.distributed_c10d._resolve_process_group(args[-1]).size()
            self.activations += Collective(NAMES[name], "", ranks, whole.numel()).received
        elif library == "c10d" and name in ("_allgather_base_", "_reduce_scatter_base_"):
            self.weights += abs(args[0].numel() - args[1].numel())
        elif library == "c10d" and name == "allreduce_":
            ranks = torch.distributed.ProcessGroup.unbox(args[1]).size()
            self.weights += sum(Collective("all_reduce", "", ranks, x.numel()).received for x in args[0])
        return out
