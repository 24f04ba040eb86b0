"""Compare plans with theory: idle time of pipelines, and memory of every rank.

    python experiments/bench_plans.py                        # about 3 minutes on two cores
    python experiments/bench_plans.py --only bubble          # one of the tables
    python experiments/bench_plans.py --quick                # two rows of each table: to see the program run

- bubble: idle share of a step under pp4, compared with the theory of `vitpar plan`. The stages sleep instead of
  computing, so that they need no cores; forward, input gradients and weight gradients take equally long. The excess
  over theory is the cost of sending and scheduling.
- memory: growth of each rank's resident memory for a model with small activations. After a step it is compared with
  parameters and moments as in `vitpar plan` (gradients are freed by then). The peak within a step is compared with
  these plus gradients, gathered parameters and communication buffers.

Traffic is not here: `tests/strategy/test_traffic.py` compares every collective of a layer with theory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.harness import RETURNS_FREED, Report, Spread, answer, forget_most, is_rank, memory, on_ranks, parser
from bench.ours import vitpar_step
from vitpar.launch.world_group import all_gather_json
from vitpar.models import ViTConfig, model_config
from vitpar.parallel.mesh import pipeline_mesh
from vitpar.parallel.pipeline import build_schedule, pipeline_stage
from vitpar.planner.cost.elements import layer_parameters
from vitpar.planner.cost.pipeline import idle_share
from vitpar.planner.describe import summarize
from vitpar.strategy import SCHEDULES, Plan, parse, place_of_rank, stages_of_rank, token_layout, validate

CPU = torch.device("cpu")
PIPELINES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
PLANS = ("dp2", "dp2+zero1", "dp2+zero2", "fsdp2", "pp2", "pp2xfsdp2")
COLUMNS = {
    "bubble": ("schedule", "micro-batches", "idle, measured", "in theory"),
    "memory": ("plan", "rank", "after a step, MiB", "in theory", "at most, MiB", "in theory"),
}


def main() -> int:
    """Read the options, measure, print tables."""
    options = parser(__doc__, COLUMNS)
    options.add_argument("--quick", action="store_true", help="two rows of each table")
    given = options.parse_args()
    report, most = Report(given.json), 2 if given.quick else None
    if "bubble" in (given.only or COLUMNS):
        found = [on_ranks(__file__, 4, "bubble", name, OMP_NUM_THREADS="1") for name in PIPELINES[:most]]
        cells = [
            [row["schedule"], str(row["microbatches"]), Spread.of(row["idle"]).text(3), f"{row['theory']:.3f}"]
            for row in found
        ]
        report.show("bubble", COLUMNS["bubble"], cells, found)
    if "memory" in (given.only or COLUMNS):
        environment = {"OMP_NUM_THREADS": "1", **RETURNS_FREED}
        found = [
            row
            for mesh in PLANS[:most]
            for row in on_ranks(__file__, parse(mesh).world_size, "memory", mesh, **environment)
        ]
        keys = ("rest", "state", "peak", "most")
        cells = [[row["mesh"], str(row["rank"]), *(f"{row[key] / 2**20:.1f}" for key in keys)] for row in found]
        report.show("memory", COLUMNS["memory"], cells, found)
    return 0


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient.clone(), None, None


class Sleeper(nn.Module):
    """A stage that sleeps for `seconds` in forward, and as long for its input's and for its weight's gradient."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(())), seconds

    def forward(self, x: Tensor) -> Tensor:
        # Images require no gradient, but in a real first stage backward also passes through the blocks.
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        return _Sleep.apply(x, self.seconds, self.seconds) + _Sleep.apply(self.weight, 0.0, self.seconds)


def idle(name: str, microbatches: int = 8, steps: int = 6, slot: float = 0.08) -> dict[str, Any]:
    """Measure the idle share of a rank in each step of pp4 after the first.

    name: schedule. slot: seconds of a micro-batch's forward on one rank.
    """
    virtual = 1 if SCHEDULES[name].stages == "one" else 2
    plan = replace(parse("pp4"), schedule=name, virtual_stages=virtual, microbatches=microbatches)
    pipe, seconds = pipeline_mesh(plan, "cpu"), slot / virtual
    shape = partial(torch.empty, 1, 8, device="meta")
    mine = stages_of_rank(pipe.get_local_rank("pp"), plan)
    stages = [
        pipeline_stage(Sleeper(seconds), index, plan.num_stages, shape(), shape(), CPU, pipe.get_group("pp"))
        for index in mine
    ]
    running = build_schedule(plan, stages, microbatches, lambda y, target: y.sum())
    given = [torch.zeros(microbatches, 8)] if 0 in mine else []
    last: dict[str, Any] = {"target": torch.zeros(microbatches, 1)} if plan.num_stages - 1 in mine else {}
    shares = []
    for _ in range(steps):
        dist.barrier()
        begun = time.perf_counter()
        running.step(*given, return_outputs=False, **({**last, "losses": []} if last else {}))
        dist.barrier()
        shares.append(1 - 3 * slot * microbatches / (time.perf_counter() - begun))
    theory = idle_share(plan, microbatches)
    return {"schedule": name, "microbatches": microbatches, "idle": shares[1:], "theory": theory}


def resident(mesh: str) -> list[dict[str, Any]]:
    """Measure how many bytes the resident memory of each rank grew, and compute them.

    Each rank's row holds rest (after a step), state (the same, computed), peak (within the step) and most (the same,
    computed).
    """
    batch, plan = 16, replace(parse(mesh), microbatches=2)
    small = model_config("vit_custom", patch_size=16, image_size=32, embed_dim=24, depth=8, num_heads=6, num_classes=10)
    large = replace(small, embed_dim=512, num_heads=8, mlp_hidden_dim=2048)
    for config in (small, large):  # the small model loads libraries first
        before = memory()
        valid = validate(plan, config, batch)
        step = vitpar_step(config, valid, batch, CPU)
        place = token_layout(valid.strategies(config.layer_names)["embed"])[place_of_rank(valid, dist.get_rank())[1]]
        images = torch.randn(len(place.row_range(batch)), config.channels, config.image_size, config.image_size)
        labels = torch.randint(0, config.num_classes, (batch,))
        step(images, labels)
        forget_most()
        step(images, labels)
    row = {"mesh": mesh, "rank": dist.get_rank(), "rest": memory() - before, "peak": memory(most=True) - before}
    plan = validate(plan, large, batch)
    here = summarize(large, plan, batch, bytes_per_parameter=12).pipeline[place_of_rank(plan, dist.get_rank())[0]]
    most = _most(large, plan, [name for stage in here.layers for name in stage])
    return all_gather_json({**row, "state": here.state_bytes, "most": most})


def _most(config: ViTConfig, plan: Plan, names: list[str]) -> int:
    """Return the bytes at the peak of a step, without activations: the backward of the last micro-batch.

    They are the sum of:

    - parameters and two moments, sharded;
    - gradients: unsharded until the last micro-batch ends; with +zero2 the shards and one unsharded layer;
    - gathered parameters: of two layers and the buffer of the next under fsdp; of all layers with +zero1, +zero2, pp;
    - the communication buffer with the gradients of the largest layer.
    """
    kept = layer_parameters(config, plan)
    strategy, shares = plan.strategy, [kept[name] for name in names]
    parts = strategy.degree("fsdp") * (strategy.degree("dp") if strategy.zero else 1)
    wholes = [share * parts for share in shares]
    gradients = sum(shares) + max(wholes) if strategy.zero == 2 else sum(wholes)
    gathered = 0
    if parts > 1:
        gathered = sum(wholes) if strategy.zero or plan.pp > 1 else sum(sorted(wholes)[-3:])
    message = max(wholes) if plan.strategy.size > 1 else 0
    return 4 * (3 * sum(shares) + gradients + gathered + message)


def measure(table: str, row: str) -> Any:
    """Measure one row of a table on this rank."""
    tables: dict[str, Callable[[str], Any]] = {"bubble": idle, "memory": resident}
    return tables[table](row)


if __name__ == "__main__":
    if is_rank():
        answer(measure)
    sys.exit(main())
