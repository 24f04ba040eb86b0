"""One rank of ``bench_checkpoint.py``: ``python -m bench.save_rank MODEL MESH BATCH ROUNDS FOLDER OUTPUT.json``.

Ways to save parameters and AdamW's state take turns: how long training waits, how long until all is on the disk, how
much longer steps take meanwhile, and how many bytes there are. All wait for the disk (fsync) before they say that they
are done, and compute checksums.
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
"""Until what was begun is on the disk."""
STEPS = 3
"""While a checkpoint is written, and as many without one."""


def gathered(tensors: Tensors, path: Path) -> Wait:
    """Save by hand: gather every tensor on rank 0 and write one file."""
    everything = dict(tensors)
    for name, parameter in tensors.items():
        for moment in ("exp_avg", "exp_avg_sq"):  # which a rank lacks that has no part of the parameter
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
    """torch.distributed.checkpoint as it comes."""
    dcp.save(dict(tensors), checkpoint_id=path)
    return lambda: None


def asynchronous_dcp(kind: AsyncCheckpointerType) -> Callable[[Tensors, Path], Wait]:
    """Save asynchronously with DCP. Its thread needs a separate group, or its messages mix with those of training."""
    group = dist.new_group(backend="gloo") if kind is AsyncCheckpointerType.THREAD else None

    def begin(tensors: Tensors, path: Path) -> Wait:
        saved = dcp.async_save(dict(tensors), checkpoint_id=path, async_checkpointer_type=kind, process_group=group)
        return saved.result  # type: ignore[union-attr]

    return begin


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def main(model_name: str, mesh: str, batch: str, rounds: str, folder: str, output: str) -> None:
    """See the module's docstring."""
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
    for number in range(int(rounds) + 1):  # the first of all is to start threads and processes, and is not counted
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
    os._exit(0)  # the process that DCP keeps would wait for us, and we for it


if __name__ == "__main__":
    with reporting():
        main(*sys.argv[1:])
