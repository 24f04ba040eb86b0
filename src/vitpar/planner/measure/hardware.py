"""Measures a `Hardware` profile. Every rank of the world takes part, and all compute and send at the same time, as they
do in training: on a machine whose ranks share cores, caches or links that is slower than one alone.

1. what memory ranks take besides tensors, and every operation in every group of the world: all sizes and strides
   that divide it
2. products of square matrices, by dtype and size
3. a copy of a large tensor
4. how long every operation takes in every group
5. the slow-down of products and of an all-reduce that run beside each other
6. on GPUs, copies between them and the host, and the optimizer there
7. a pipeline of two stages that compute nothing
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitpar.parallel.mesh import pipeline_mesh
from vitpar.parallel.pipeline import build_schedule, pipeline_stage
from vitpar.planner.measure.clock import Clock, Group
from vitpar.planner.measure.device import device_name, memory_bytes
from vitpar.planner.measure.sending import Shape, group_shapes, message, operations, own_group, scratch
from vitpar.planner.measure.slack import slack
from vitpar.planner.measure.work import copied, products
from vitpar.planner.profile.curve import Curve, Timing
from vitpar.planner.profile.hardware import Hardware, Host, Link, Matmul, Operation, Overlap
from vitpar.strategy import parse

Progress = Callable[[int, int, str], None]
"""Called with (points done, points in all, what is measured next)."""

LONG = 0.05  # seconds of either kind of work, with more of the other beside it
SIDES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
MESSAGES = {"cpu": (2**12, 2**15, 2**18, 2**20, 2**22, 2**24), "cuda": (2**14, 2**17, 2**20, 2**23, 2**26, 2**28)}
COPIES = {"cpu": (2**20, 2**23, 2**26), "cuda": (2**24, 2**27, 2**30)}


@dataclass(frozen=True)
class Effort:
    """How much is measured. seconds: of each point, about. sides: of matrices. messages, copies: bytes."""

    seconds: float
    dtypes: tuple[str, ...]
    sides: tuple[int, ...]
    messages: tuple[int, ...]
    copies: tuple[int, ...]

    @classmethod
    def usual(cls, device: str, seconds: float = 0.25) -> Effort:
        """Minutes at most."""
        return cls(seconds, DTYPES[device], SIDES[device], MESSAGES[device], COPIES[device])


def profile_hardware(
    name: str,
    device: torch.device,
    ranks_per_node: int,
    effort: Effort | None = None,
    progress: Progress = lambda done, total, words: None,
) -> Hardware:
    """Measure the machine of this world. Collective: every rank calls it, and all return the same profile.

    name: what the profile is to be called. ranks_per_node: neighbouring ranks that share a node.
    """
    effort = effort or Effort.usual(device.type)
    world = dist.get_world_size()
    shapes = list(group_shapes(world))
    clock = Clock(device, Group(device), effort.seconds)
    total = (
        len(effort.dtypes) * len(effort.sides)
        + len(effort.copies)
        + sum(len(operations(ranks)) for ranks, _ in shapes) * len(effort.messages)
        + (world > 1)
    )
    steps = _Steps(progress, total)
    reserved = slack(device)
    taken = scratch(device, shapes, effort.messages)
    matmuls = tuple(
        Matmul(dtype=dtype, timings=tuple(_product(clock, dtype, side) for side in steps.over(effort.sides, dtype)))
        for dtype in effort.dtypes
    )
    copy = Curve(timings=tuple(_copy(clock, size) for size in steps.over(effort.copies, "copy")))
    links = []
    for shape in shapes:
        with own_group(*shape) as group:
            for operation in operations(shape[0]):
                words = f"{operation} among {shape[0]} ranks, stride {shape[1]}"
                timings = tuple(
                    message(clock, operation, group, size, taken[shape, operation, size])
                    for size in steps.over(effort.messages, words)
                )
                links.append(_link(operation, shape, ranks_per_node, timings))
    overlap = None
    if world > 1:
        steps.next("overlap")
        overlap = _overlap(clock, effort)
    profile = Hardware(
        name=name,
        device=device.type,
        device_name=device_name(device),
        backend="nccl" if device.type == "cuda" else "gloo",
        ranks=world,
        ranks_per_node=ranks_per_node,
        threads=torch.get_num_threads(),
        memory_bytes=memory_bytes(device) // (1 if device.type == "cuda" else ranks_per_node),
        matmuls=matmuls,
        copy=copy,
        links=tuple(links),
        overlap=overlap,
        host=_host(clock, effort) if device.type == "cuda" else None,
        pipeline=_pipeline(clock) if world % 2 == 0 else 0.0,
        reserved_bytes=reserved,
        pace=clock.pace,
        measured={
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )
    return profile.at_pace(clock.usual)


def _link(operation: Operation, shape: Shape, ranks_per_node: int, timings: tuple[Timing, ...]) -> Link:
    ranks, stride = shape
    nodes = len({rank // ranks_per_node for rank in range(0, ranks * stride, stride)})
    return Link(operation=operation, ranks=ranks, stride=stride, nodes=nodes, timings=timings)


class _Nothing(nn.Module):
    """A stage that hands on what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _pipeline(clock: Clock, microbatches: int = 8) -> float:
    """Seconds of an action of 1f1b over pairs of ranks: a step has one forward and one backward for every micro-batch,
    and for the one that the last stage waits for."""
    plan = replace(parse(f"pp2xdp{dist.get_world_size() // 2}"), microbatches=microbatches)
    pipe = pipeline_mesh(plan, clock.device.type)
    index, one = pipe.get_local_rank("pp"), torch.empty(1, 8, device="meta")
    module = _Nothing().to(clock.device)
    stage = pipeline_stage(module, index, 2, one, one.clone(), clock.device, pipe.get_group("pp"))
    schedule = build_schedule(plan, [stage], microbatches, lambda y, target: y.sum())
    x, target = (torch.ones(microbatches, n, device=clock.device) for n in (8, 1))

    def step() -> None:
        schedule.step(*([x] if index == 0 else []), return_outputs=False, **({"target": target} if index else {}))

    return clock.timing(1, step).seconds / (2 * (microbatches + 1))


class _Steps:
    """Counts the points and says what comes next."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def next(self, words: str) -> None:
        self._progress(self._done, self._total, words)
        self._done += 1

    def over(self, sizes: Iterable[int], words: str) -> Iterator[int]:
        for size in sizes:
            self.next(words)
            yield size


def _product(clock: Clock, dtype: str, side: int) -> Timing:
    return clock.timing(2 * side**3, products(clock.device, getattr(torch, dtype), [(side, side, side)]))


def _copy(clock: Clock, size: int) -> Timing:
    return clock.timing(size, copied(clock.device, size))


def _host(clock: Clock, effort: Effort) -> Host:
    """Pinned memory to the GPU, and AdamW on the processors, as +offload has it."""

    def timing(size: int) -> Timing:
        source = torch.zeros(size // 4, pin_memory=True)
        target = torch.empty(size // 4, device=clock.device)
        return clock.timing(size, lambda: target.copy_(source, non_blocking=True))

    elements = effort.copies[0] // 4
    parameter = nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.zeros(elements)
    update = clock.timing(elements, torch.optim.AdamW([parameter]).step).seconds / elements
    return Host(timings=tuple(map(timing, effort.copies)), update=update)


def _overlap(clock: Clock, effort: Effort) -> Overlap:
    """Matrix products while all-reduces go on for longer than they do, and the other way round."""
    side = effort.sides[-1] // 2
    a = torch.zeros(side, side, device=clock.device)
    out = torch.empty_like(a)
    message = torch.zeros(effort.messages[-1] // 4, device=clock.device)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a, out=out)

    def send(times: int) -> list[dist.Work]:
        return [dist.all_reduce(message, async_op=True) for _ in range(times)]

    def wait(works: list[dist.Work]) -> None:
        for work in works:
            work.wait()

    product = clock.timing(1, lambda: compute(1)).seconds
    reduction = clock.timing(1, lambda: wait(send(1))).seconds
    products, reductions = math.ceil(LONG / product), math.ceil(LONG / reduction)
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
