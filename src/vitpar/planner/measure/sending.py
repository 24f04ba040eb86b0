"""What ranks send each other: in which groups, by which operations, how long it takes and what memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from vitpar.launch.malloc import freed_memory_given_back
from vitpar.launch.world_group import all_reduce_, barrier
from vitpar.parallel.collective import all_gather, all_reduce, reduce_scatter
from vitpar.planner.measure.clock import Clock
from vitpar.planner.measure.resident import Peak
from vitpar.planner.profile.curve import Timing
from vitpar.planner.profile.hardware import OPERATIONS, Operation

Shape = tuple[int, int]
"""Of a group: ranks, and how far each is from the next."""


def group_shapes(world: int) -> Iterator[Shape]:
    """(ranks, stride) of every way to cut `world` ranks into groups of equally distant ranks, small groups first."""
    for ranks in range(2, world + 1):
        for stride in range(1, world // ranks + 1):
            if world % (ranks * stride) == 0:
                yield ranks, stride


def group_of(rank: int, ranks: int, stride: int) -> list[int]:
    """The members of the group of `rank`."""
    block, inside = divmod(rank, ranks * stride)
    first = block * ranks * stride + inside % stride
    return list(range(first, first + ranks * stride, stride))


def operations(ranks: int) -> tuple[Operation, ...]:
    """Those that groups of so many ranks are measured with."""
    return tuple(operation for operation in OPERATIONS if operation != "p2p" or ranks == 2)


@contextmanager
def own_group(ranks: int, stride: int) -> Iterator[ProcessGroup]:
    """This rank's group of that shape, until the end; all ranks make all of them."""
    world = dist.get_world_size()
    if ranks == world:
        yield dist.group.WORLD
        return
    every = sorted({tuple(group_of(rank, ranks, stride)) for rank in range(world)})
    made = {members: dist.new_group(list(members)) for members in every}
    group = made[tuple(group_of(dist.get_rank(), ranks, stride))]
    yield group
    dist.destroy_process_group(group)


def scratch(
    device: torch.device, shapes: Sequence[Shape], sizes: Sequence[int]
) -> Mapping[tuple[Shape, Operation, int], int]:
    """Bytes that every operation takes besides what is sent and received, at most on any rank; 0 where the system does
    not tell. Before anything large was computed."""
    found = {}
    with freed_memory_given_back():
        for shape in shapes:
            with own_group(*shape) as group:
                for operation in operations(shape[0]):
                    for size in sizes:
                        found[shape, operation, size] = _taken(device, operation, group, size)
    return found


def message(clock: Clock, operation: Operation, group: ProcessGroup, size: int, scratch: int) -> Timing:
    """One operation on `size` bytes; of p2p half of there and back. scratch: bytes that it takes."""
    work, length, _ = _work(clock.device, operation, group, size)
    timing = clock.timing(4 * length, work)
    times = 2 if operation == "p2p" else 1
    return timing.model_copy(update={"seconds": timing.seconds / times, "scratch": scratch})


def _taken(device: torch.device, operation: Operation, group: ProcessGroup, size: int) -> int:
    """Bytes that it takes besides what is sent and received, at most on any rank; 0 where the system does not tell."""
    work, _, given = _work(device, operation, group, size)
    work()  # what is made once does not count
    barrier()
    peak = Peak(device)
    peak.forget()
    work()
    most = torch.tensor(max(0, (peak.grown or 0) - given), device=device)
    all_reduce_(most, dist.ReduceOp.MAX)
    return int(most)


def _work(
    device: torch.device, operation: Operation, group: ProcessGroup, size: int
) -> tuple[Callable[[], object], int, int]:
    """An operation on about `size` bytes (p2p: there and back), how many numbers these are, and the bytes of the result
    that it makes."""
    ranks, me = group.size(), group.rank()
    length = max(1, size // 4 // ranks) * ranks
    whole, part = torch.zeros(length, device=device), torch.zeros(length // ranks, device=device)
    other = torch.zeros_like(whole)
    if operation == "p2p":
        peer = dist.get_global_rank(group, 1 - me)

        def there_and_back() -> None:
            for sending in (me == 0, me == 1):
                dist.send(whole, peer, group) if sending else dist.recv(other, peer, group)

        return there_and_back, length, 0
    works: dict[Operation, tuple[Callable[[], object], int]] = {
        "all_reduce": (lambda: all_reduce(whole, group), 4 * length),
        "all_gather": (lambda: all_gather(part, 0, group), 4 * length),
        "reduce_scatter": (lambda: reduce_scatter(whole, 0, group), 4 * length // ranks),
        "all_to_all": (lambda: dist.all_to_all_single(other, whole, group=group), 0),
    }
    work, given = works[operation]
    return work, length, given
