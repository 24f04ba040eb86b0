"""Debug checks of every step, to find what is wrong with a plan or a machine. Slow: each one is collective.

Before and after a step: the state of the run (parameters, optimizer state, averages) is finite, and replicas are equal
bit by bit on the ranks that hold them. After backward: every parameter has a gradient, and it is finite. torch compares
the collectives that the ranks of a group call, if TORCH_DISTRIBUTED_DEBUG is DETAIL.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitpar.checkpoint.index import PARAMETERS
from vitpar.errors import FaultError
from vitpar.launch.world_group import all_gather_json
from vitpar.parallel import ParallelModel
from vitpar.recipe import Recipe
from vitpar.sharded import local
from vitpar.text import ranks
from vitpar.training.faults.non_finite import not_finite
from vitpar.training.saving.saver import TrainingState

Part = tuple[str, tuple[int, ...]]
"""Name of a tensor, and this rank's coordinates on those axes of its mesh that shard it."""


class DebugChecks:
    """Debug checks of one run. All ranks make it and use it together.

    Raises FaultError, the same on all ranks. Gradients need not be finite if the recipe skips such steps.
    """

    def __init__(self, model: ParallelModel, state: TrainingState, recipe: Recipe) -> None:
        self._model, self._state = model, state
        self._finite = recipe.faults.non_finite == "stop" and not model.precision.scales_loss

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Check before, during and after `step`."""
        self._kept(f"before step {step}")
        yield
        self._kept(f"after step {step}")

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
    """Return a checksum of the bits of each tensor's local part.

    It is the sum of all elements' bits, each times a different odd number, modulo 2**64, so it changes if any single
    element changes or two swap places.
    """
    sums: dict[Part, Tensor] = {}
    for name, tensor in tensors.items():
        part, place = local(tensor.detach()), list[int]()
        if not part.numel():
            continue
        if isinstance(tensor, DTensor):
            here = tensor.device_mesh.get_coordinate()
            assert here is not None, "this rank holds a part"
            place = [at for at, one in zip(here, tensor.placements, strict=True) if not one.is_replicate()]
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()]
        bits = part.contiguous().view(-1).view(whole).long()
        sums[name, tuple(place)] = (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()
    values = torch.stack([value.cpu() for value in sums.values()]).tolist() if sums else []
    return dict(zip(sums, values, strict=True))
