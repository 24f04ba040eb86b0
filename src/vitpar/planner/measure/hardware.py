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
from vitpar.planner.measure.device import Peak, date_and_versions, device_name, memory_bytes
from vitpar.planner.measure.sending import message, overlap, own_group, pipeline_action, scratch
from vitpar.planner.measure.steps import Training
from vitpar.planner.profile.cluster import group_shapes, operations
from vitpar.planner.profile.profiles import Curve, Hardware, Host, Link, Matmul, Timing
from vitpar.strategy import parse, validate
from vitpar.training.recipe import Recipe

TINY = {"embed_dim": 16, "depth": 4, "num_heads": 2, "patch_size": 8, "image_size": 16, "num_classes": 2}
ProductShape = tuple[int, int, int]
"""Shape of a matrix product: rows, features that are summed over, columns."""


@dataclass(frozen=True)
class MeasureEffort:
    """How much is measured. seconds: of each point, about. sides: of matrices. messages, copies: bytes."""

    seconds: float
    dtypes: tuple[str, ...]
    sides: tuple[int, ...]
    messages: tuple[int, ...]
    copies: tuple[int, ...]

    @classmethod
    def usual(cls, device: str, seconds: float = 0.25) -> MeasureEffort:
        """Minutes at most."""
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
    effort: MeasureEffort | None = None,
    progress: Progress = lambda done, total, words: None,
) -> Hardware:
    """Measure the machine of this world. Collective: every rank calls it, and all return the same profile.

    name: what the profile is to be called. ranks_per_node: neighbouring ranks that share a node.
    """
    effort = effort or MeasureEffort.usual(device.type)
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
    taken = scratch(device, shapes, effort.messages)
    matmuls = []
    for dtype in effort.dtypes:
        works = ((side, products(device, getattr(torch, dtype), [(side,) * 3])) for side in over(effort.sides, dtype))
        matmuls.append(Matmul(dtype=dtype, timings=tuple(clock.timing(2 * side**3, work) for side, work in works)))
    copy = Curve(timings=tuple(clock.timing(size, copied(device, size)) for size in over(effort.copies, "copy")))
    links = []
    for ranks, stride in shapes:
        nodes = len({rank // ranks_per_node for rank in range(0, ranks * stride, stride)})
        with own_group(ranks, stride) as group:
            for operation in operations(ranks):
                words = f"{operation} among {ranks} ranks, stride {stride}"
                timings = tuple(
                    message(clock, operation, group, size, taken[(ranks, stride), operation, size])
                    for size in over(effort.messages, words)
                )
                links.append(Link(operation=operation, ranks=ranks, stride=stride, nodes=nodes, timings=timings))
    slowdown = None
    if world > 1:
        progress(next(done), total, "overlap")
        slowdown = overlap(clock, effort.sides[-1] // 2, effort.messages[-1])
    profile = Hardware(
        name=name,
        device=device.type,
        device_name=device_name(device),
        backend="nccl" if device.type == "cuda" else "gloo",
        ranks=world,
        ranks_per_node=ranks_per_node,
        threads=torch.get_num_threads(),
        memory_bytes=memory_bytes(device) // (1 if device.type == "cuda" else ranks_per_node),
        matmuls=tuple(matmuls),
        copy=copy,
        links=tuple(links),
        overlap=slowdown,
        host=_host(clock, effort) if device.type == "cuda" else None,
        pipeline=pipeline_action(clock) if world % 2 == 0 else 0.0,
        reserved_bytes=reserved,
        pace=clock.pace,
        measured=date_and_versions(),
    )
    return profile.at_pace(clock.usual)


def _host(clock: Clock, effort: MeasureEffort) -> Host:
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


def products(
    device: torch.device, dtype: torch.dtype, shapes: Iterable[ProductShape], fast_sums: bool = True
) -> Callable[[], None]:
    """Matrix products of these shapes, one after the other; in float8 with a scale for each row and column.

    fast_sums: `fast` of ``vitpar.parallel.float8.multiply``.
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
    (a, of_a), (b, of_b) = (scaled_rows(torch.randn(count, inside, device=device)) for count in (rows, columns))
    return lambda: multiply(a, of_a, b, of_b, torch.bfloat16, fast_sums)


def copied(device: torch.device, size: int) -> Callable[[], object]:
    """A copy that reads and writes `size` bytes together."""
    source = torch.ones(size // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def process_overhead(device: torch.device) -> int:
    """Bytes that a rank needs besides tensors: objects of models and optimizers, buffers of process groups, gaps.

    In the mean of some plans, on the fullest rank; 0 where the system does not tell. Collective, and before anything
    large was computed.
    """
    config, ranks = model_config("vit_custom", **TINY), dist.get_world_size()
    recipe = Recipe.model_validate({"data": {"path": "unused"}, "train": {"batch_size": 4 * ranks, "compile": False}})
    training, found = Training(recipe, config), []
    with freed_memory_given_back():
        for words in (f"dp{ranks}", f"fsdp{ranks}") if ranks > 1 else ("dp1",):
            plan = validate(parse(words), config, recipe.train.batch_size)
            training.step(plan, device)()  # what is loaded or made once does not count
            peak = Peak(device)
            step = training.step(plan, device)
            step()
            peak.forget()
            step()
            copies = 4  # of parameters: themselves, gradients, two moments
            tensors = copies * sum(layer_parameters(config, plan).values()) * torch.float32.itemsize
            found.append(max(0, (peak.grown or 0) - tensors))
    most = torch.tensor(int(statistics.mean(found)), device=device)
    all_reduce_(most, dist.ReduceOp.MAX)
    return int(most)
