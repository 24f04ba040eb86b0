"""Runs steps of a plan and measures them: time, and the memory of every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from vitpar.models.config import ViTConfig
from vitpar.parallel import ParallelModel, parallelize
from vitpar.planner.measure.resident import Peak, tensors_given_back
from vitpar.strategy import Plan, validate
from vitpar.train.gradient_norm import clip_, global_norm
from vitpar.train.optimizer import ShardedOptimizer
from vitpar.train.optimizer_section import OptimizerSection


@dataclass(frozen=True)
class Measured:
    """Steps of a plan. seconds: of each step, for the slowest rank. memory: bytes that each rank took at most, None
    where the system does not tell."""

    seconds: tuple[float, ...]
    memory: tuple[int | None, ...]


def measure_steps(
    config: ViTConfig,
    plan: Plan,
    batch_size: int,
    device: torch.device,
    *,
    precision: str,
    compile_blocks: bool = False,
    optimizer: OptimizerSection = OptimizerSection(),
    seconds: float = 3.0,
) -> Measured:
    """Train `plan`, which is validated, on random images of `batch_size`. Collective; equal for all ranks.

    seconds: to spend on timed steps, about; there are at least three, after two that do not count.
    """

    def built(config: ViTConfig, plan: Plan) -> Callable[[], None]:
        model = parallelize(
            config,
            plan,
            batch_size=batch_size,
            device=device,
            precision_name=precision,
            compile_blocks=compile_blocks,
        )
        return _step(model, batch_size, optimizer)

    with tensors_given_back():
        if device.type == "cpu":  # what programs load for themselves is not the plan's
            small = replace(config, width=config.heads * 8, hidden=config.heads * 16, depth=plan.num_stages)
            small_plan = replace(plan, layers=plan.layers, split="even")
            if plan.is_uniform:
                step = built(small, validate(small_plan, small, batch_size))
                step()
                del step
        peak = Peak(device)
        step = built(config, plan)
        step()
        peak.forget()
        step()
        grown = peak.grown
    step()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        dist.barrier()
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        mine = torch.tensor(time.perf_counter() - begun, dtype=torch.float64, device=device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        taken.append(mine.item())
    memory: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(memory, grown)
    return Measured(tuple(taken), tuple(memory))


def _step(model: ParallelModel, batch_size: int, settings: OptimizerSection) -> Callable[[], None]:
    """What the trainer does in a step, without data and records."""
    updates = ShardedOptimizer(model.named_parameters(), settings, heads=model.config.heads)
    c, device = model.config, model.device
    rows = len(model.image_rows(batch_size)) if model.takes_images else 0
    images = torch.randn(rows, c.channels, c.image_size, c.image_size, device=device).to(model.precision.compute)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=device)
    keys = torch.zeros(batch_size, dtype=torch.int64, device=device)

    def step() -> None:
        model.forward_backward(images if model.takes_images else None, labels, keys)
        gradients = updates.gradients()
        clip_(gradients, global_norm(gradients, model), 1.0)
        updates.step(1e-3)

    return step
