"""One rank of ``bench_checkpoint.py``: ``python -m bench.save_rank MODEL MESH BATCH ROUNDS FOLDER OUTPUT.json``.

The ways to save parameters and AdamW state take turns. For each one it measures how long training stalls, how long
until the files are on the disk, how long steps take while a checkpoint is written, and its bytes. All of them call
fsync before they report completion, and compute checksums.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from bench.settings import CLIP, LR, OPTIMIZER, SEED
from vitpar.checkpoint import Writer
from vitpar.launch import ALONE, find_world, join, reporting
from vitpar.models import model_config
from vitpar.parallel import Execution, parallelize
from vitpar.strategy import parse, validate
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.step import TrainStep

Tensors = dict[str, Tensor]
Wait = Callable[[], object]
"""Wait until the checkpoint that was begun is on the disk."""
STEPS = 3
"""Training steps that are timed while a checkpoint is written, and as many that are timed without one."""


def gathered(tensors: Tensors, path: Path) -> Wait:
    """Save by hand: gather every tensor on rank 0 and write one file."""
    everything = dict(tensors)
    for name, parameter in tensors.items():
        # A rank without a shard of a parameter has no moments for it, but full_tensor() below is collective.
        for moment in ("exp_avg", "exp_avg_sq"):
            if name.startswith("model."):
                key = f"optimizer.{moment}.{name.removeprefix('model.')}"
                everything.setdefault(key, torch.zeros_like(parameter))
    whole = {n: t.full_tensor() if isinstance(t := everything[n], DTensor) else t for n in sorted(everything)}
    if dist.get_rank() == 0:
        path.mkdir()
        with (path / "state.pt").open("wb") as file:
            torch.save(whole, file)
            os.fsync(file.fileno())
    dist.barrier()
    return lambda: None


def plain_dcp(tensors: Tensors, path: Path) -> Wait:
    """Save synchronously with DCP and its default options."""
    dcp.save(dict(tensors), checkpoint_id=path)
    return lambda: None


def asynchronous_dcp(kind: AsyncCheckpointerType) -> Callable[[Tensors, Path], Wait]:
    """Return a function that saves asynchronously with DCP, in a thread or a process.

    The thread needs its own process group: otherwise its messages mix with those of training.
    """
    group = dist.new_group(backend="gloo") if kind is AsyncCheckpointerType.THREAD else None

    def begin(tensors: Tensors, path: Path) -> Wait:
        saved = dcp.async_save(dict(tensors), checkpoint_id=path, async_checkpointer_type=kind, process_group=group)
        return saved.result  # type: ignore[union-attr]

    return begin


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks, in seconds."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def main(model_name: str, mesh: str, batch: str, rounds: str, folder: str, output: str) -> None:
    """Measure all ways to save and write the measurements to `output` as JSON (see the module's docstring)."""
    device = join(find_world() or ALONE, "cpu")
    config = model_config(model_name)
    plan = validate(parse(mesh), config, int(batch))
    model = parallelize(config, plan, Execution(int(batch), seed=SEED), device)
    optimizer = ShardedOptimizer(model.named_parameters(), SimpleNamespace(**vars(OPTIMIZER)))
    images = torch.randn(len(model.image_rows(int(batch))), 3, config.image_size, config.image_size)
    labels, writer = torch.zeros(int(batch), dtype=torch.long), Writer()
    update = TrainStep(model, optimizer, clip_grad_norm=CLIP, before_update=writer.staged)

    def step() -> None:
        update(1, LR, images if model.takes_images else None, labels)

    def vitpar(tensors: Tensors, path: Path) -> Wait:
        writer.begin(path, tensors, {"state.json": "{}"})
        return writer.finish

    def vitpar_waiting(tensors: Tensors, path: Path) -> Wait:
        vitpar(tensors, path)()
        return lambda: None

    ways = {
        "vitpar": vitpar,
        "vitpar, waited for": vitpar_waiting,
        "torch.save of the gathered state": gathered,
        "DCP": plain_dcp,
        "DCP, asynchronous by a thread": asynchronous_dcp(AsyncCheckpointerType.THREAD),
        "DCP, asynchronous by a process": asynchronous_dcp(AsyncCheckpointerType.PROCESS),
    }
    step()
    found: dict[str, dict[str, list[float]]] = {
        name: {"stall": [], "total": [], "beside": [], "bytes": []} for name in ways
    }
    alone: list[float] = []
    # The first round starts threads and processes and is dropped below.
    for number in range(int(rounds) + 1):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
        dist.barrier()
        alone.append(slowest(time.perf_counter() - begun))
        for name in list(ways)[:: 1 if number % 2 else -1]:
            parameters = {f"model.{key}": p.detach() for key, p in model.named_parameters()}
            tensors = parameters | {f"optimizer.{key}": value for key, value in optimizer.state().items()}
            for steps in (0, STEPS):
                path = Path(folder, f"{name}-{number}-{steps}")
                dist.barrier()
                begun = time.perf_counter()
                wait = ways[name](tensors, path)
                stall = time.perf_counter() - begun
                for _ in range(steps):
                    step()
                wait()
                dist.barrier()
                total = time.perf_counter() - begun
                if steps:
                    found[name]["beside"].append(slowest(total))
                else:
                    found[name]["stall"].append(slowest(stall))
                    found[name]["total"].append(slowest(total))
                    found[name]["bytes"].append(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(path)
    if dist.get_rank() == 0:
        result = {"ways": {name: {k: v[1:] for k, v in one.items()} for name, one in found.items()}, "alone": alone[1:]}
        Path(output).write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # at a normal exit, DCP's background process and this one would wait for each other


if __name__ == "__main__":
    with reporting():
        main(*sys.argv[1:])
