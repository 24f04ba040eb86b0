"""Whether all ranks of a process group call the same collectives in the same order.

Each collective is announced to the group in the store, and called only when all have announced the same one: ranks that
differ would hang or mix up each other's numbers, and could not be asked any more. So it is slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitpar.errors import FaultError
from vitpar.launch.world_group import broadcast_json
from vitpar.strategy.words import ranks

WAIT_S = 120.0
"""Seconds that a rank waits for the others of a group to come to the same collective."""
_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_OTHER = ("send", "recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd")
"""Operations there that are no collectives."""
_UNEVEN = ("alltoall_", "alltoall_base_", "all_to_all_single", "gather_", "scatter_", "monitored_barrier_")
"""Collectives in which ranks may have different shapes."""


class CollectiveOrder(TorchDispatchMode):
    """Watches what runs inside `of`. All ranks make it and use it together.

    Sees all collectives of torch.distributed, functional ones too, but no sending from rank to rank. at: the one that
    this rank is at, in words, empty outside. Raises FaultError, in all ranks of the group, where they differ.
    """

    def __init__(self) -> None:
        super().__init__()
        token = broadcast_json(uuid4().hex)  # another trainer of the same ranks has other keys
        self._store: Any = None
        if dist.get_world_size() > 1:
            store = dist.distributed_c10d._get_default_store().clone()
            store.set_timeout(timedelta(seconds=WAIT_S))
            self._store = dist.PrefixStore(f"vitpar/order/{token}", store)
        self._step = 0
        self._numbers: Counter[str] = Counter()
        self._said: dict[str, str] = {}
        self.at = ""

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Watch the collectives of `step`."""
        if self._store is None:
            yield
            return
        self._step = step
        self._numbers.clear()
        with self:
            yield
        # Who calls one more than the others finds them here.
        groups = {group.group_name: group for group in dist.distributed_c10d._world.pg_map}
        for name in sorted(groups):
            self._announce("nothing more", groups[name])
        self.at = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it dispatches again on its local tensors, collectives among them
        if isinstance(func, torch._ops.OpOverload):
            space, _, name = func._schema.name.partition("::")
            if space in _SPACES and name not in _OTHER:
                given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
                words = name if name in _UNEVEN else f"{name} of {', '.join(_shapes(args))}"
                self._announce(words, _group({**given, **(kwargs or {})}))
        return func(*args, **(kwargs or {}))

    def _announce(self, mine: str, group: dist.ProcessGroup) -> None:
        members, rank = dist.get_process_group_ranks(group), dist.get_rank()
        if len(members) == 1:
            return
        name = group.group_name
        self._numbers[name] += 1
        number = self._numbers[name]
        what = f"collective {number} of {ranks(members)}"
        self.at = f"{what}, {mine}"
        key = f"{name}/{self._step}/{number}"
        self._store.set(f"{key}/{rank}", mine)
        try:
            told = [answer.decode() for answer in self._store.multi_get([f"{key}/{member}" for member in members])]
        except dist.DistError:
            missing = [member for member in members if not self._store.check([f"{key}/{member}"])]
            raise FaultError(
                f"step {self._step}: {ranks(missing)} did not come within {WAIT_S:.0f} s to {self.at}"
            ) from None
        # Whoever has announced this one has heard all of the last one.
        if name in self._said:
            self._store.delete_key(f"{self._said[name]}/{rank}")
        self._said[name] = key
        if len(set(told)) > 1:
            callers: dict[str, list[int]] = {}
            for member, call in zip(members, told, strict=True):
                callers.setdefault(call, []).append(member)
            words = ", but ".join(f"{ranks(who)} called {call}" for call, who in callers.items())
            raise FaultError(f"step {self._step}: as {what}, {words}")


def _group(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    if "group_name" in arguments:
        return torch._C._distributed_c10d._resolve_process_group(arguments["group_name"])
    return dist.ProcessGroup.unbox(arguments["process_group"])


def _shapes(values: Any) -> Iterator[str]:
    """Type and shape of all tensors in the arguments of an operation, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        elif isinstance(value, list | tuple):
            yield from _shapes(value)
