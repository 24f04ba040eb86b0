"""Compare the cost of saving a checkpoint with torch.distributed.checkpoint (DCP).

    python experiments/bench_checkpoint.py                              # ten minutes on two cores
    python experiments/bench_checkpoint.py --model vit_nano_patch4_16   # seconds: does it run?

Parameters and AdamW state of a ViT-S/16 under fsdp2 are saved in turns. All flush to the disk and compute checksums.
"training waits" is the time until training may go on, asynchronous saves included; the last column is the time of three
steps with a save until it is on the disk, over three steps without one.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench.harness import Report, Spread, answer, is_rank, on_ranks, parser, ratio, slowest, turns
from bench.ours import vitpar_step
from vitpar.checkpoint.writer import Writer
from vitpar.models import model_config
from vitpar.strategy import parse, validate

STEPS, BATCH = 3, 8
Wait = Callable[[], object]
"""Wait until the checkpoint that was begun is on the disk."""


def main() -> int:
    """Read the options, measure and print the table."""
    options = parser(__doc__)
    options.add_argument("--model", default="vit_small_patch16_224", help="that is saved")
    options.add_argument("--rounds", type=int, default=7, help="turns of each way to save (7)")
    given = options.parse_args()
    report = Report(given.json, model=f"{given.model} under fsdp2, batch {BATCH}")
    with tempfile.TemporaryDirectory() as place:
        found = on_ranks(__file__, 2, given.model, str(given.rounds), place, OMP_NUM_THREADS="1")
    alone = found["no save"]["total"]
    rows = []
    for name, one in found.items():
        cells = [Spread.of(1e3 * seconds for seconds in one["stall"]).text(0), f"{one['bytes'][0] / 1e6:.1f}"]
        rows.append([name, *cells, Spread.of(one["total"]).text(2), ratio(one["total"], alone).text(2)])
    heads = ("", "training waits, ms", "MB", f"{STEPS} steps and the save, s", f"over {STEPS} steps")
    report.show("saving", heads, rows, found)
    return 0


def measure(model: str, rounds: str, folder: str) -> dict[str, dict[str, list[float]]]:
    """Save in every way in turns; return the seconds of the slowest rank and the bytes on the disk."""
    config, writer = model_config(model), Writer()
    plan = validate(parse("fsdp2"), config, BATCH)
    step = vitpar_step(config, plan, BATCH, torch.device("cpu"), before_update=writer.staged)
    rows = len(step.model.image_rows(BATCH))
    batch = torch.randn(rows, 3, config.image_size, config.image_size), torch.zeros(BATCH, dtype=torch.long)
    # Its messages must not mix with those of training.
    group = dist.new_group(backend="gloo")

    def vitpar(tensors: dict[str, Any], path: Path) -> Wait:
        writer.begin(path, tensors, {"state.json": "{}"})
        return writer.finish

    def plain(tensors: dict[str, Any], path: Path) -> Wait:
        dcp.save(tensors, checkpoint_id=path)
        return lambda: None

    def asynchronous(tensors: dict[str, Any], path: Path) -> Wait:
        return dcp.async_save(tensors, checkpoint_id=path, process_group=group).result  # type: ignore[union-attr]

    def turn(save: Callable[[dict[str, Any], Path], Wait]) -> tuple[float, float, int]:
        path = Path(folder, "saved")
        tensors: dict[str, Any] = {f"model.{key}": p.detach() for key, p in step.model.named_parameters()}
        tensors |= {f"optimizer.{key}": value for key, value in step.optimizer.state().items()}
        dist.barrier()
        begun = time.perf_counter()
        wait = save(tensors, path)
        stall = time.perf_counter() - begun
        for _ in range(STEPS):
            step(*batch)
        wait()
        dist.barrier()
        total = time.perf_counter() - begun
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        return *slowest([stall, total]), size  # type: ignore[return-value]

    ways = {"no save": lambda *_: lambda: None, "vitpar": vitpar, "DCP": plain, "DCP, asynchronous": asynchronous}
    step(*batch)
    contenders = {name: partial(turn, save) for name, save in ways.items()}
    found = [*turns(contenders, int(rounds) + 1)][1:]  # the first round starts threads
    keys = ("stall", "total", "bytes")
    return {name: {key: [one[name][n] for one in found] for n, key in enumerate(keys)} for name in ways}


if __name__ == "__main__":
    if is_rank():
        answer(measure)
    sys.exit(main())
