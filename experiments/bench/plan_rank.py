"""One rank of ``bench_plans.py``: ``python -m bench.plan_rank TABLE OUTPUT.json ARGUMENTS…``. Rank 0 writes JSON."""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.collectives import Received
from bench.ours import vitpar_step
from bench.resident import forget_most, most_resident, resident
from bench.timing import take_turns
from vitpar.launch import ALONE, find_world, join, reporting
from vitpar.launch.world_group import all_gather_json
from vitpar.models import ViTConfig, model_config
from vitpar.parallel import Execution, parallelize
from vitpar.parallel.mesh import pipeline_mesh
from vitpar.parallel.pipeline import build_schedule, pipeline_stage
from vitpar.planner.cost.elements import layer_parameters
from vitpar.planner.cost.pipeline import idle_share
from vitpar.planner.describe import summarize
from vitpar.strategy import SCHEDULES, Plan, parse, place_of_rank, stages_of_rank, token_layout, validate
from vitpar.strategy.layout import mesh_axes, sharding_axes
from vitpar.strategy.traffic import layer_traffic

CPU = torch.device("cpu")


def traffic(mesh: str) -> dict[str, Any]:
    """Count the elements that a rank receives for a block's forward and backward, and compute them by formula.

    Returns activations (counted), table (formula), kept (formula, if gathered tensors were kept for backward), weights
    (parameters and gradients, counted) and weights_in_theory (formula).
    """
    config = model_config(
        "vit_custom", patch_size=16, image_size=64, embed_dim=192, depth=1, num_heads=8, num_classes=10
    )
    rows, plan = 16, validate(parse(mesh), config, 16)
    model = parallelize(config, plan, Execution(rows), CPU)
    (stage,) = model.stages.values()
    part = token_layout(plan.strategy)[place_of_rank(plan, dist.get_rank())[1]]
    x = torch.randn(
        len(part.row_range(rows)), config.tokens, len(part.feature_range(config.embed_dim)), requires_grad=True
    )
    with Received() as received:
        stage.layers()["blocks.0"](x).sum().backward()
    forward, backward = layer_traffic(config.layers["blocks.0"], plan.strategy, rows)
    table = sum(collective.received * times for collective, times in [*forward.items(), *backward.items()])
    again = sum(
        collective.received * times for collective, times in forward.items() if "gather" in collective.operation
    )
    return {
        "mesh": mesh,
        "activations": received.activations,
        "table": table,
        "kept": table - again,
        "weights": received.weights,
        "weights_in_theory": _weights(config, plan),
    }


def _weights(config: ViTConfig, plan: Plan) -> float:
    """Return the elements received for a block: parameters gathered in forward and backward, and reduced gradients."""
    share, sizes = layer_parameters(config, plan)["blocks.0"], dict(mesh_axes(plan.strategy))
    shards = math.prod(sizes[axis] for axis in sharding_axes(plan.strategy))
    copies = sizes.get("d", 1)
    return 3 * (shards - 1) * share + 2 * (copies - 1) / copies * share


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


def bubble(name: str, microbatches: int = 8, steps: int = 6, slot: float = 0.08) -> dict[str, Any]:
    """Measure the idle share of a rank in each step of pp4 after the first.

    name: schedule. slot: seconds of a micro-batch's forward on one rank.
    """
    schedule = SCHEDULES[name]
    virtual = 1 if schedule.stages == "one" else 2
    plan = replace(parse("pp4"), schedule=name, virtual_stages=virtual, microbatches=microbatches)
    pipe, seconds = pipeline_mesh(plan, "cpu"), slot / virtual
    shape = partial(torch.empty, 1, 8, device="meta")
    mine = stages_of_rank(pipe.get_local_rank("pp"), plan)
    modules = {index: Sleeper(seconds) for index in mine}
    stages = [
        pipeline_stage(modules[index], index, plan.num_stages, shape(), shape(), CPU, pipe.get_group("pp"))
        for index in mine
    ]
    running = build_schedule(plan, stages, microbatches, lambda y, target: y.sum())
    first, last = 0 in mine, plan.num_stages - 1 in mine
    idle = []
    for step in range(steps):
        dist.barrier()
        begun = time.perf_counter()
        running.step(
            *([torch.zeros(microbatches, 8)] if first else []),
            return_outputs=False,
            **({"target": torch.zeros(microbatches, 1), "losses": []} if last else {}),
        )
        dist.barrier()
        busy = 3 * slot * microbatches
        if step:
            idle.append(1 - busy / (time.perf_counter() - begun))
    return {"schedule": name, "microbatches": microbatches, "idle": idle, "theory": idle_share(plan, microbatches)}


def memory(mesh: str, microbatches: int = 2) -> list[dict[str, Any]]:
    """Measure how many bytes the resident memory of each rank grew, and compute them.

    Each rank's row holds rest (after a step), state (the same, computed), peak (within the step) and most (the same,
    computed).
    """
    batch, plan = 16, replace(parse(mesh), microbatches=microbatches)
    small = model_config("vit_custom", patch_size=16, image_size=32, embed_dim=24, depth=8, num_heads=6, num_classes=10)
    large = replace(small, embed_dim=512, num_heads=8, mlp_hidden_dim=2048)
    for config in (small, large):  # the small model loads libraries first
        before = resident()
        step, images, labels = contender(config, validate(plan, config, batch), batch)
        step(images, labels)
        forget_most()
        step(images, labels)
    peak, rest = most_resident() - before, resident() - before
    plan = validate(plan, large, batch)
    here = summarize(large, plan, batch, bytes_per_parameter=12).pipeline[place_of_rank(plan, dist.get_rank())[0]]
    row = {"mesh": mesh, "rank": dist.get_rank(), "rest": rest, "peak": peak, "state": here.state_bytes}
    row["most"] = _most(large, plan, [name for stage in here.layers for name in stage])
    return all_gather_json(row)


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


def layerwise(*meshes: str) -> dict[str, list[float]]:
    """Time steps under each plan in turn; return the seconds of every step on the slowest rank, by plan."""
    config = model_config("vit_tiny_patch16_112", num_heads=4, depth=6, num_classes=100)
    batch = 32
    contenders = {}
    for mesh in meshes:
        step, images, labels = contender(config, validate(parse(mesh), config, batch), batch)
        contenders[mesh] = partial(step, images, labels)
        contenders[mesh]()
    times = take_turns(contenders, 20, dist.barrier)
    found = {}
    for mesh, measured in times.items():
        wall = torch.tensor(measured.wall, dtype=torch.float64)
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        found[mesh] = wall.tolist()
    return found


def contender(config: ViTConfig, plan: Plan, batch: int) -> tuple[Callable, Tensor, Tensor]:
    """Return vitpar's step under `plan`, random images of this rank, and labels of the global batch."""
    g = torch.Generator().manual_seed(0)
    step = vitpar_step(config, plan, batch, CPU)
    rows = token_layout(plan.strategies(config.layer_names)["embed"])[place_of_rank(plan, dist.get_rank())[1]]
    local = len(rows.row_range(batch))
    images = torch.randn(local, config.channels, config.image_size, config.image_size, generator=g)
    return step, images, torch.randint(0, config.num_classes, (batch,), generator=g)


TABLES: dict[str, Callable[..., Any]] = {
    "traffic": traffic,
    "bubble": bubble,
    "memory": memory,
    "layerwise": layerwise,
}

if __name__ == "__main__":
    with reporting():
        join(find_world() or ALONE, "cpu")
        result = TABLES[sys.argv[1]](*sys.argv[3:])
        if dist.get_rank() == 0:
            Path(sys.argv[2]).write_text(json.dumps(result))
        dist.barrier()
        os._exit(0)  # a normal exit may deadlock, see bench.rank
