"""Measurement of a `Hardware` profile, collectively over all ranks of the world.

All ranks compute and communicate at the same time, as in training: where ranks share cores, caches or links, that is
slower than one rank alone. Measured in this order:

1. memory of a rank apart from tensors
2. products of square matrices, by dtype and size
3. copies of tensors
4. time of every operation in every group (all sizes and strides that divide the world)
5. slow-down of matrix products and of all-reduces that run at the same time
6. on GPUs, copies from host memory, and AdamW on the host
7. actions of an empty pipeline of two stages

Memory comes first: once large tensors were freed, new ones reuse their memory and the peaks no longer show.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from torch import nn

from vitpar.launch.resources import freed_memory_given_back
from vitpar.launch.world_group import all_reduce_
from vitpar.models import model_config
from vitpar.parallel.float8 import E4M3, multiply, scaled_rows
from vitpar.planner.cost.elements import layer_parameters
from vitpar.planner.measure.clock import Clock, ClockedRanks, Progress
from vitpar.planner.measure.device import date_and_versions, device_name, memory_bytes
from vitpar.planner.measure.sending import message, most_nodes, overlap, own_group, pipeline_action
from vitpar.planner.measure.steps import Training
from vitpar.planner.profile.cluster import group_shapes, operations
from vitpar.planner.profile.curves import Curve, Timing
from vitpar.planner.profile.profiles import Hardware, Host, Link, Matmul
from vitpar.recipe import Recipe
from vitpar.recipe.machine import replace_auto_precision
from vitpar.strategy import parse, validate

TINY = {"embed_dim": 16, "depth": 4, "num_heads": 2, "patch_size": 8, "image_size": 16, "num_classes": 2}
ProductShape = tuple[int, int, int]
"""(rows, inner features, columns) of a matrix product."""


@dataclass(frozen=True)
class MeasureEffort:
    """The points of a hardware profile, and the time spent on each."""

    seconds: float
    """Approximate seconds for each point."""
    dtypes: tuple[str, ...]
    """Names of the data types of matrix products."""
    sides: tuple[int, ...]
    """Rows and columns of the square matrices."""
    messages: tuple[int, ...]
    """Bytes of the messages of collectives and p2p."""
    copies: tuple[int, ...]
    """Bytes that copies read and write."""

    @classmethod
    def usual(cls, device: str, seconds: float) -> MeasureEffort:
        """Return the default for a device type, which takes a few minutes at most."""
        if device == "cpu":
            messages = 2**12, 2**15, 2**18, 2**20, 2**22, 2**24
            return cls(
                seconds, ("float32", "bfloat16"), (64, 128, 256, 512, 1024), messages, copies=(2**20, 2**23, 2**26)
            )
        messages, dtypes = (2**14, 2**17, 2**20, 2**23, 2**26, 2**28), ("float32", "bfloat16", "float16")
        return cls(seconds, dtypes, (512, 1024, 2048, 4096, 8192), messages, copies=(2**24, 2**27, 2**30))


def profile_hardware(
    name: str,
    device: torch.device,
    ranks_per_node: int,
    effort: MeasureEffort,
    progress: Progress = lambda done, total, words: None,
) -> Hardware:
    """Measure the hardware of this world. Collective; all ranks return the same profile.

    name: name of the profile.
    ranks_per_node: number of consecutive ranks on one node.
    effort: points to measure.
    progress: called before each point.
    """
    world = dist.get_world_size()
    shapes = list(group_shapes(world))
    clock = Clock(device, ClockedRanks(device), effort.seconds)
    total = (
        len(effort.dtypes) * len(effort.sides)
        + len(effort.copies)
        + sum(len(operations(ranks)) for ranks, _ in shapes) * len(effort.messages)
        + (world > 1)
    )
    done = count()

    def over(sizes: Iterable[int], words: str) -> Iterator[int]:
        for size in sizes:
            progress(next(done), total, words)
            yield size

    reserved = process_overhead(device)
    matmuls = []
    for dtype in effort.dtypes:
        works = ((side, products(device, getattr(torch, dtype), [(side,) * 3])) for side in over(effort.sides, dtype))
        matmuls.append(Matmul(dtype=dtype, timings=tuple(clock.timing(2 * side**3, work) for side, work in works)))
    copy = Curve(timings=tuple(clock.timing(size, copied(device, size)) for size in over(effort.copies, "copy")))
    links = []
    for ranks, stride in shapes:
        nodes = most_nodes(world, ranks, stride, ranks_per_node)
        with own_group(ranks, stride) as group:
            for operation in operations(ranks):
                words = f"{operation} among {ranks} ranks, stride {stride}"
                timings = tuple(message(clock, operation, group, size) for size in over(effort.messages, words))
                links.append(Link(operation=operation, ranks=ranks, stride=stride, nodes=nodes, timings=timings))
    slowdown = None
    if world > 1:
        progress(next(done), total, "overlap")
        slowdown = overlap(clock, effort.sides[-1] // 2, effort.messages[-1])
    return Hardware(
        name=name,
        device=device.type,
        device_name=device_name(device),
        backend="nccl" if device.type == "cuda" else "gloo",
        ranks=world,
        ranks_per_node=ranks_per_node,
        memory_bytes=memory_bytes(device) // (1 if device.type == "cuda" else ranks_per_node),
        matmuls=tuple(matmuls),
        copy=copy,
        links=tuple(links),
        overlap=slowdown,
        host=_host(clock, effort) if device.type == "cuda" else None,
        pipeline=pipeline_action(clock) if world % 2 == 0 else 0.0,
        reserved_bytes=reserved,
        measured=date_and_versions(),
    )


def _host(clock: Clock, effort: MeasureEffort) -> Host:
    """Measure what +offload needs: copies from pinned memory to the GPU, and AdamW on the CPU."""

    def timing(size: int) -> Timing:
        source = torch.zeros(size // 4, pin_memory=True)
        target = torch.empty(size // 4, device=clock.device)
        return clock.timing(size, lambda: target.copy_(source, non_blocking=True))

    elements = effort.copies[0] // 4
    parameter = nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.zeros(elements)
    update = clock.timing(elements, torch.optim.AdamW([parameter]).step).seconds / elements
    return Host(timings=tuple(map(timing, effort.copies)), update=update)


def products(
    device: torch.device, dtype: torch.dtype, shapes: Iterable[ProductShape], fast_sums: bool = True
) -> Callable[[], None]:
    """Return a function that computes matrix products of these shapes one after the other.

    Products in float8 have a scale for each row and column.

    fast_sums: argument `fast` of ``vitpar.parallel.float8.multiply``.
    """
    works = [_product(device, dtype, shape, fast_sums) for shape in shapes]

    def work() -> None:
        for one in works:
            one()

    return work


def _product(device: torch.device, dtype: torch.dtype, shape: ProductShape, fast_sums: bool) -> Callable[[], object]:
    rows, inside, columns = shape
    if dtype is not E4M3:
        a, b = (torch.randn(size, device=device).to(dtype) for size in ((rows, inside), (inside, columns)))
        out = a.new_empty(rows, columns)
        return lambda: torch.mm(a, b, out=out)
    (a, of_a), (b, of_b) = (scaled_rows(torch.randn(lines, inside, device=device)) for lines in (rows, columns))
    return lambda: multiply(a, of_a, b, of_b, torch.bfloat16, fast_sums)


def copied(device: torch.device, size: int) -> Callable[[], object]:
    """Return a function that copies a tensor: it reads `size` / 2 bytes and writes as many."""
    source = torch.ones(size // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def process_overhead(device: torch.device) -> int:
    """Return the bytes that a rank needs apart from tensors: Python objects, buffers of process groups, fragmentation.

    The mean over small dp and fsdp plans, on the rank where it is largest; 0 where the system reports no peak.
    Collective. Call it before anything large has been computed.
    """
    config, ranks = model_config("vit_custom", **TINY), dist.get_world_size()
    recipe = Recipe.model_validate({"data": {"path": "unused"}, "train": {"batch_size": 4 * ranks, "compile": False}})
    recipe = replace_auto_precision(recipe, device.type)
    training, overheads = Training(recipe, config), []
    with freed_memory_given_back():
        for words in (f"dp{ranks}", f"fsdp{ranks}") if ranks > 1 else ("dp1",):
            plan = validate(parse(words), config, recipe.train.batch_size)
            training.step(plan, device)()  # loads libraries and makes connections, which are not the plan's
            copies = 4  # parameters, gradients, two moments
            tensors = copies * sum(layer_parameters(config, plan).values()) * torch.float32.itemsize
            overheads.append(max(0, (training.peak(plan, device) or 0) - tensors))
    most = torch.tensor(int(statistics.mean(overheads)), device=device)
    all_reduce_(most, dist.ReduceOp.MAX)
    return int(most)
