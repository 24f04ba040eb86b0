"""One rank of one case on the CPU: ``python -m bench.rank CASE quick|full both|vitpar|hand OUTPUT.json``.

Started by ``bench_cpu.py``. With ``both``, it checks that the contenders compute the same losses and gradient norms,
then times them in turn. With one contender, it measures its memory.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bench.by_hand import BY_HAND
from bench.cases import CASES, FULL, QUICK, Case, Size
from bench.ours import vitpar_step
from bench.resident import most_resident, resident
from bench.settings import SEED, Step
from bench.timing import take_turns
from vitpar.launch import ALONE, find_world, join, reporting
from vitpar.strategy import batch_arithmetic, image_layout, place_of_rank

WARM_UP = 3
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # largest relative difference of losses and gradient norms in warm-up steps


def main(name: str, size_name: str, side: str, output: str) -> None:
    """Measure one case and write the measurements to `output` as JSON (see the module's docstring)."""
    device = join(find_world() or ALONE, "cpu")
    case = CASES[name]
    size = case.size or {"full": FULL, "quick": QUICK}[size_name]
    before = resident()
    rows = local_rows(case, size)
    makers = {
        "hand": lambda: on_rows(BY_HAND[name](size.config), rows),
        "vitpar": lambda: ours(case, size, device),
    }
    steps = {key: make() for key, make in makers.items() if side in (key, "both")}
    batches = local_batches(size, rows)
    first = {key: warm_up(step, batches) for key, step in steps.items()}
    result: dict[str, object] = {"first": first}
    if side == "both":
        compare(first["hand"], first["vitpar"], TOLERANCE[case.precision])
        result["seconds"] = timed(steps, batches, size)
    else:
        growth = torch.tensor([most_resident() - before])
        dist.all_reduce(growth, dist.ReduceOp.MAX)
        result["memory_bytes"] = growth.item()
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(result))
    dist.barrier()
    # A normal exit may deadlock: DDP's reducer, destroyed last, joins gloo's threads while it holds the GIL, which one
    # of them may need to free a tensor. Seen on torch 2.13.
    os._exit(0)


def local_rows(case: Case, size: Size) -> list[int]:
    """Return the indices of this rank's images in the global batch."""
    plan = size.plan(case.mesh)
    layout = image_layout(plan.strategy)
    return batch_arithmetic(plan, size.batch_size).rows(layout[place_of_rank(plan, dist.get_rank())[1]])


def local_batches(size: Size, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return WARM_UP batches: this rank's random images [rows, channels, size, size] and all labels [batch]."""
    config = size.config
    g = torch.Generator().manual_seed(SEED)
    batches = []
    for _ in range(WARM_UP):
        images = torch.randn(size.batch_size, config.channels, config.image_size, config.image_size, generator=g)
        labels = torch.randint(0, config.num_classes, (size.batch_size,), generator=g)
        batches.append((images[rows], labels))
    return batches


def ours(case: Case, size: Size, device: torch.device) -> Step:
    """Return vitpar's step. It takes images in the compute dtype, so they are converted first."""
    plan = size.plan(case.mesh)
    step = vitpar_step(size.config, plan, size.batch_size, device, precision=case.precision)
    compute = step.model.precision.compute
    return lambda images, labels: step(images.to(compute), labels)


def on_rows(step: Step, rows: list[int]) -> Step:
    """Return a hand-written step that takes all labels: it passes on those of this rank's images."""
    return lambda images, labels: step(images, labels[rows])


def warm_up(step: Step, batches: list[tuple[Tensor, Tensor]]) -> list[tuple[float, float]]:
    """Make a step on every batch; return the loss of the global batch and the gradient norm of each."""
    values = []
    for images, labels in batches:
        loss, norm = step(images, labels)
        loss = loss.clone()
        dist.all_reduce(loss)
        values.append((loss.item(), norm.item()))
    return values


def compare(hand: list[tuple[float, float]], vitpar: list[tuple[float, float]], tolerance: float) -> None:
    """Raise AssertionError if the contenders' losses or gradient norms differ by more than `tolerance` (relative)."""
    for number, (theirs, ours) in enumerate(zip(hand, vitpar, strict=True), start=1):
        for what, a, b in zip(("loss", "gradient norm"), theirs, ours, strict=True):
            assert abs(a - b) <= tolerance * abs(a), f"{what} of step {number} is {a} by hand and {b} in vitpar"


def timed(
    steps: dict[str, Step], batches: list[tuple[Tensor, Tensor]], size: Size
) -> dict[str, dict[str, list[float]]]:
    """Time the steps of each contender; return wall-clock seconds of the slowest rank and CPU seconds of all ranks."""
    settle: Callable[[], object] = dist.barrier if dist.get_world_size() > 1 else lambda: None
    contenders = {key: partial(step, *batches[0]) for key, step in steps.items()}
    trial = sum(times.wall[0] for times in take_turns(contenders, 1, settle).values())
    rounds = torch.tensor(min(size.rounds, max(5, int(size.seconds / trial))))
    dist.broadcast(rounds, 0)
    seconds = {}
    for key, times in take_turns(contenders, int(rounds), settle).items():
        wall, cpu = (torch.tensor(values, dtype=torch.float64) for values in (times.wall, times.cpu))
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        seconds[key] = {"wall": wall.tolist(), "cpu": cpu.tolist()}
    return seconds


if __name__ == "__main__":
    with reporting():
        main(*sys.argv[1:])
