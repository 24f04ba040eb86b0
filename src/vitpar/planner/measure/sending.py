"""Measurement of communication: time of operations in every group, and its overlap with computing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from vitpar.parallel.collective import all_gather, all_reduce, reduce_scatter
from vitpar.parallel.mesh import pipeline_mesh
from vitpar.parallel.pipeline import Stage, build_schedule
from vitpar.planner.measure.clock import Clock
from vitpar.planner.profile.curves import Timing
from vitpar.planner.profile.profiles import Operation, Overlap
from vitpar.strategy import parse

LONG = 0.05  # seconds of the work whose slow-down is measured, while the other kind runs longer


def groups_of(world: int, ranks: int, stride: int) -> list[list[int]]:
    """Return all groups of `ranks` ranks that are `stride` apart."""
    length = ranks * stride
    firsts = (block + place for block in range(0, world, length) for place in range(stride))
    return [list(range(first, first + length, stride)) for first in firsts]


def most_nodes(world: int, ranks: int, stride: int, ranks_per_node: int) -> int:
    """Return the number of nodes of the group that is on most of them, of all groups of this shape."""
    return max(len({rank // ranks_per_node for rank in group}) for group in groups_of(world, ranks, stride))


@contextmanager
def own_group(ranks: int, stride: int) -> Iterator[ProcessGroup]:
    """Create all groups of this shape and yield this rank's; destroy it afterwards. Collective over the world."""
    world = dist.get_world_size()
    if ranks == world:
        assert dist.group.WORLD is not None, "ranks are in a world"
        yield dist.group.WORLD
        return
    made = [(members, dist.new_group(members)) for members in groups_of(world, ranks, stride)]
    group = next(group for members, group in made if dist.get_rank() in members)
    yield group
    dist.destroy_process_group(group)


def message(clock: Clock, operation: Operation, group: ProcessGroup, size: int) -> Timing:
    """Return the timing of one operation on about `size` bytes; of p2p half of a round trip. Collective."""
    work, length = _work(clock.device, operation, group, size)
    timing = clock.timing(4 * length, work)
    times = 2 if operation == "p2p" else 1
    return timing.model_copy(update={"seconds": timing.seconds / times})


def overlap(clock: Clock, side: int, size: int) -> Overlap:
    """Measure how much matrix products slow down during all-reduces, and all-reduces during products. Collective.

    side: rows and columns of the matrices.
    size: bytes of an all-reduce.
    """
    a = torch.zeros(side, side, device=clock.device)
    out = torch.empty_like(a)
    sent = torch.zeros(size // 4, device=clock.device)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a, out=out)

    def send(times: int) -> list[dist.Work]:
        return [dist.all_reduce(sent, async_op=True) for _ in range(times)]

    def wait(works: list[dist.Work]) -> None:
        for work in works:
            work.wait()

    product = clock.timing(1, lambda: compute(1)).seconds
    reduction = clock.timing(1, lambda: wait(send(1))).seconds
    products, reductions = math.ceil(LONG / product), math.ceil(LONG / reduction)
    # The products must end before the all-reduces, even if overlap makes them several times slower.
    enough = math.ceil(4 * products * product / reduction)

    def computed_beside() -> float:
        works = send(enough)
        begun = time.perf_counter()
        compute(products)
        clock.computed()
        taken = time.perf_counter() - begun
        wait(works)
        return taken

    def sent_beside() -> float:
        begun = time.perf_counter()
        works = send(reductions)
        while not all(work.is_completed() for work in works):
            compute(1)
        taken = time.perf_counter() - begun
        wait(works)
        return taken

    alone = clock.timing(1, lambda: compute(products)).seconds, clock.timing(1, lambda: wait(send(reductions))).seconds
    beside = clock.middle(computed_beside), clock.middle(sent_beside)
    return Overlap(compute=max(1.0, beside[0] / alone[0]), communication=max(1.0, beside[1] / alone[1]))


def pipeline_action(clock: Clock, microbatches: int = 8) -> float:
    """Return the seconds of an empty pipeline action with its message, under 1f1b over pairs of ranks. Collective."""
    plan = replace(parse(f"pp2xdp{dist.get_world_size() // 2}"), microbatches=microbatches)
    pipe = pipeline_mesh(plan, clock.device.type)
    index, one = pipe.get_local_rank("pp"), torch.empty(1, 8, device="meta")
    module = nn.PReLU().to(clock.device)  # computes almost nothing, and has one parameter
    stage = Stage(module, index, 2, one, one.clone(), clock.device, pipe.get_group("pp"))
    schedule = build_schedule(plan, [stage], microbatches, lambda y, target: y.sum())
    x, target = (torch.ones(microbatches, n, device=clock.device) for n in (8, 1))

    def step() -> None:
        if index == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=target, return_outputs=False)

    # The critical path of m micro-batches over two stages has m + 1 forwards and m + 1 backwards.
    return clock.timing(1, step).seconds / (2 * (microbatches + 1))


def _work(
    device: torch.device, operation: Operation, group: ProcessGroup, size: int
) -> tuple[Callable[[], object], int]:
    """Return (a call of the operation, its float32 elements).

    size: bytes of the tensor, rounded to elements that the ranks divide. A p2p call is a round trip.
    """
    ranks, me = group.size(), group.rank()
    length = max(1, size // 4 // ranks) * ranks
    whole, part = torch.zeros(length, device=device), torch.zeros(length // ranks, device=device)
    other = torch.zeros_like(whole)
    if operation == "p2p":
        peer = dist.get_global_rank(group, 1 - me)

        def there_and_back() -> None:
            for sending in (me == 0, me == 1):
                dist.send(whole, peer, group) if sending else dist.recv(other, peer, group)

        return there_and_back, length
    works: dict[Operation, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(whole, group),
        "all_gather": lambda: all_gather(part, 0, group),
        "reduce_scatter": lambda: reduce_scatter(whole, 0, group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return works[operation], length
