"""Memory that computing takes: counted tensor by tensor on a CPU, by the allocator on a GPU."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is entered: how many bytes of what operations made since then are still there, and were at most.

    What an operation takes and gives back within itself is not seen. Compiled code runs uncompiled meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    @property
    def now(self) -> int:
        """Bytes that are there."""
        self._storages = {key: pair for key, pair in self._storages.items() if not pair[0].expired()}
        return sum(size for _, size in self._storages.values())

    def restart(self) -> None:
        """Forget the most so far."""
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(x)._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = _storage(x)
                if storage._cdata not in given:
                    self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, self.now)
        return result


class AllocatedBytes:
    """The same on a GPU: what was asked of its allocator, by compiled code and inside operations, too."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0

    @property
    def now(self) -> int:
        """Bytes that are there."""
        return self._asked("current")

    @property
    def most(self) -> int:
        """Bytes that were there at most."""
        return self._asked("peak")

    def restart(self) -> None:
        """Forget the most so far."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def __enter__(self) -> Self:
        self.restart()
        self._before = 0
        self._before = self.now
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _asked(self, when: str) -> int:
        return torch.cuda.memory_stats(self._device)[f"requested_bytes.all.{when}"] - self._before


def live_bytes(device: torch.device) -> LiveBytes | AllocatedBytes:
    """What counts on `device`."""
    return AllocatedBytes(device) if device.type == "cuda" else LiveBytes()


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
