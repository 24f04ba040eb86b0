"""Checks of every step, for finding what is wrong with a plan or a machine: slow, since each asks all ranks.

Before and after a step: everything the run keeps (parameters, optimizer state, averages) is finite, and what several
ranks hold is the same on them, bit by bit. After backward: every parameter has a gradient, and it is finite. All along:
the ranks of a group call the same collectives (``vitpar.training.faults.collective_order``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitpar.errors import FaultError
from vitpar.launch.world_group import all_gather_json
from vitpar.parallel import ParallelModel
from vitpar.strategy.words import ranks
from vitpar.training.faults.collective_order import CollectiveOrder
from vitpar.training.faults.non_finite import not_finite
from vitpar.training.optim.optimizer import local
from vitpar.training.recipe import Recipe
from vitpar.training.saving.training_state import PARAMETERS, TrainingState

Part = tuple[str, tuple[int, ...]]
"""A tensor's name, and the place of the part of it on the axes of its mesh that shard it."""


class DebugChecks:
    """Those of one run. All ranks make it and use it together. Raises FaultError, the same on all ranks.

    Gradients need not be finite where the recipe says that such steps are skipped.
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
        """The collective that this rank is at, in words; empty outside a step."""
        return self._order.at

    def gradients(self, step: int) -> None:
        """Every parameter of which this rank has a part has a gradient now. None need not: where `backward` gives none,
        the plan has lost it."""
        parameters = {name: p for name, p in self._model.named_parameters() if local(p).numel()}
        missing = [name for name, p in parameters.items() if p.grad is None]
        there = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        bad = not_finite(there) if self._finite else []
        for rank, (absent, wrong) in enumerate(all_gather_json((missing[:1], bad[:1]))):
            if absent:
                raise FaultError(f"after backward of step {step} {absent[0]} has no gradient on rank {rank}")
            if wrong:
                raise FaultError(
                    f"after backward of step {step} the gradient of {wrong[0]} on rank {rank} is not finite"
                )

    def _kept(self, when: str) -> None:
        tensors = {name.removeprefix(PARAMETERS): tensor for name, tensor in self._state.tensors().items()}
        bad = not_finite(tensors)
        sums = [(name, place, checksum) for (name, place), checksum in checksums(tensors).items()]
        answers = all_gather_json((bad[:1], sums))
        for rank, (wrong, _) in enumerate(answers):
            if wrong:
                raise FaultError(f"{when} {wrong[0]} on rank {rank} is not finite")
        holders: dict[Part, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, (_, sums) in enumerate(answers):
            for name, place, checksum in sums:
                holders[name, tuple(place)][checksum].append(rank)
        for (name, _), by_sum in holders.items():
            if len(by_sum) > 1:
                # Those that fewer hold come last: they are likely wrong.
                groups = sorted(by_sum.values(), key=lambda who: (-len(who), who))
                raise FaultError(f"{when} {name} differs between {' and '.join(ranks(who) for who in groups)}")


@torch.no_grad()
def checksums(tensors: Mapping[str, Tensor]) -> dict[Part, int]:
    """A number for the bits of each tensor's part on this rank: another if any one element is another."""
    found: dict[Part, Tensor] = {}
    for name, tensor in tensors.items():
        part = local(tensor.detach())
        if part.numel():
            found[name, _place(tensor)] = _checksum(part)
    values = torch.stack([value.cpu() for value in found.values()]).tolist() if found else []
    return dict(zip(found, values, strict=True))


def _checksum(part: Tensor) -> Tensor:
    """Of all elements, each times another odd number, modulo 2**64: neither one change nor an exchange goes unseen."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()]
    bits = part.contiguous().view(-1).view(whole).long()
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()


def _place(tensor: Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this rank holds a part"
    return tuple(at for at, placement in zip(place, tensor.placements, strict=True) if not placement.is_replicate())
