"""Debug checks of every step, to find what is wrong with a plan or a machine. Slow: each one is collective.

Before and after a step: the state of the run (parameters, optimizer state, averages) is finite, and replicas are equal
bit by bit on the ranks that hold them. After backward: every parameter has a gradient, and it is finite. Throughout:
the ranks of a group call the same collectives (`CollectiveOrder`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
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

from vitpar.checkpoint.index import PARAMETERS
from vitpar.errors import FaultError
from vitpar.launch.world_group import all_gather_json, broadcast_json
from vitpar.parallel import ParallelModel
from vitpar.sharded import local
from vitpar.text import ranks
from vitpar.training.faults.non_finite import not_finite
from vitpar.training.recipe import Recipe
from vitpar.training.saving.saver import TrainingState

WAIT_S = 120.0
"""Seconds that a rank waits for the others of a group to reach the same collective."""
_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of the operators of torch.distributed."""
_OTHER = ("send", "recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd")
"""Operators in these namespaces that are no collectives."""
_UNEVEN = ("alltoall_", "alltoall_base_", "all_to_all_single", "gather_", "scatter_", "monitored_barrier_")
"""Collectives in which ranks may have different shapes."""
Part = tuple[str, tuple[int, ...]]
"""Name of a tensor, and this rank's coordinates on those axes of its mesh that shard it."""


class DebugChecks:
    """Debug checks of one run. All ranks make it and use it together.

    Raises FaultError, the same on all ranks. Gradients need not be finite if the recipe skips such steps.
    """

    def __init__(self, model: ParallelModel, state: TrainingState, recipe: Recipe) -> None:
        self._model, self._state = model, state
        self._finite = recipe.faults.non_finite == "stop" and not model.precision.scales_loss
        self._order = CollectiveOrder()

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Check before, during and after `step`."""
        self._kept(f"before step {step}")
        with self._order.of(step):
            yield
        self._kept(f"after step {step}")

    def doing(self) -> str:
        """Return a description of the collective that this rank is at; empty outside a step."""
        return self._order.at

    def gradients(self, step: int) -> None:
        """Verify that every trained parameter with a local part has a gradient, and that it is finite. Collective.

        None of them is exempt: if `backward` gives one no gradient, the plan has lost it.
        """
        trained = ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)
        parameters = {name: p for name, p in trained if local(p).numel()}
        missing = [name for name, p in parameters.items() if p.grad is None]
        there = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        bad = not_finite(there) if self._finite else []
        for rank, (absent, wrong) in enumerate(all_gather_json((missing[:1], bad[:1]))):
            if absent:
                raise FaultError(f"after backward of step {step}, {absent[0]} has no gradient on rank {rank}")
            if wrong:
                raise FaultError(
                    f"after backward of step {step}, the gradient of {wrong[0]} on rank {rank} is not finite"
                )

    def _kept(self, when: str) -> None:
        tensors = self._state.tensors()
        owners, shown = self._state.owners(tensors), {name: name.removeprefix(PARAMETERS) for name in tensors}
        bad = [shown[name] for name in not_finite(tensors)]
        # Copies of a shared parameter count as replicas of their owner.
        sums = [
            (owners.get(name, name).removeprefix(PARAMETERS), place, checksum)
            for (name, place), checksum in checksums(tensors).items()
        ]
        answers = all_gather_json((bad[:1], sums))
        for rank, (wrong, _) in enumerate(answers):
            if wrong:
                raise FaultError(f"{when}, {wrong[0]} on rank {rank} is not finite")
        holders: dict[Part, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, (_, sums) in enumerate(answers):
            for name, place, checksum in sums:
                holders[name, tuple(place)][checksum].append(rank)
        for (name, _), by_sum in holders.items():
            if len(by_sum) > 1:
                # The smallest group comes last: it is likely wrong.
                groups = sorted(by_sum.values(), key=lambda who: (-len(who), who))
                raise FaultError(f"{when}, {name} differs between {' and '.join(ranks(who) for who in groups)}")


@torch.no_grad()
def checksums(tensors: Mapping[str, Tensor]) -> dict[Part, int]:
    """Return a checksum of the bits of each tensor's local part. It changes if any single element changes."""
    sums: dict[Part, Tensor] = {}
    for name, tensor in tensors.items():
        part = local(tensor.detach())
        if part.numel():
            sums[name, _place(tensor)] = _checksum(part)
    values = torch.stack([value.cpu() for value in sums.values()]).tolist() if sums else []
    return dict(zip(sums, values, strict=True))


def _checksum(part: Tensor) -> Tensor:
    """Return the sum of all elements' bits, each times a different odd number, modulo 2**64.

    It changes if one element changes or two swap places.
    """
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()]
    bits = part.contiguous().view(-1).view(whole).long()
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()


def _place(tensor: Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this rank holds a part"
    return tuple(at for at, placement in zip(place, tensor.placements, strict=True) if not placement.is_replicate())


class CollectiveOrder(TorchDispatchMode):
    """Check that all ranks of a process group call the same collectives in the same order, inside `of`.

    Each rank announces a collective to its group in the store, and calls it only when all have announced the same one.
    If ranks differed in real calls, they would hang or mix up data, and could not report it. This is slow. All ranks
    make it and use it together.

    It sees all collectives of torch.distributed, functional ones too, but no point-to-point communication. Raises
    FaultError, on all ranks of the group, if they differ.
    """

    def __init__(self) -> None:
        super().__init__()
        token = broadcast_json(uuid4().hex)  # separates the keys of several trainers on the same ranks
        self._store: Any = None
        if dist.get_world_size() > 1:
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # not in its stubs
            store.set_timeout(timedelta(seconds=WAIT_S))
            self._store = dist.PrefixStore(f"vitpar/order/{token}", store)
        self._step = 0
        self._numbers: Counter[str] = Counter()
        self._said: dict[str, str] = {}
        self.at = ""
        """Description of the collective that this rank is at; empty outside `of`."""

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
        # A rank that calls one collective more than the others meets them here.
        groups = {group.group_name: group for group in dist.distributed_c10d._world.pg_map}
        for name in sorted(groups):
            self._announce("nothing more", groups[name])
        self.at = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches again on local tensors, with its collectives
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
            answers = [answer.decode() for answer in self._store.multi_get([f"{key}/{member}" for member in members])]
        except dist.DistError:
            missing = [member for member in members if not self._store.check([f"{key}/{member}"])]
            raise FaultError(
                f"step {self._step}: {ranks(missing)} did not reach {self.at} within {WAIT_S:.0f} s"
            ) from None
        # Ranks that announced this collective have read all answers of the previous one.
        if name in self._said:
            self._store.delete_key(f"{self._said[name]}/{rank}")
        self._said[name] = key
        if len(set(answers)) > 1:
            callers: dict[str, list[int]] = {}
            for member, call in zip(members, answers, strict=True):
                callers.setdefault(call, []).append(member)
            words = ", but ".join(f"{ranks(who)} called {call}" for call, who in callers.items())
            raise FaultError(f"step {self._step}: {what} differs: {words}")


def _group(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    if "group_name" in arguments:
        return torch._C._distributed_c10d._resolve_process_group(arguments["group_name"])
    return dist.ProcessGroup.unbox(arguments["process_group"])


def _shapes(values: Any) -> Iterator[str]:
    """Yield dtype and shape of all tensors in the arguments of an operator, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        elif isinstance(value, list | tuple):
            yield from _shapes(value)
