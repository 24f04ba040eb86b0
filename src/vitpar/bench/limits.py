"""How fast the parts of a step could be at most, by what this device does with nothing else to do.

| phase                  | limit                                                                                   |
|------------------------|-----------------------------------------------------------------------------------------|
| forward, backward      | FLOPs of the matrix products, at the rate of the products of the model's blocks         |
| pipeline               | both, and no rank waits for another                                                     |
| waiting for gradients  | the all-reduces of gradients, while nothing else goes on                                |
| norm and clipping      | bytes of the gradients, at the rate of a copy                                           |
| update                 | bytes of parameters, gradients, optimizer state and averages, at the rate of a copy     |

Not counted: what tensor parallelism, a pipeline and ``fully_shard`` send, what is computed again in backward (+ckpt),
and the products that Muon's update consists of.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.launch.world_group import all_reduce_
from vitpar.parallel import ParallelModel
from vitpar.parallel.float8 import E4M3
from vitpar.planner.measure.clock import ClockedRanks
from vitpar.planner.measure.hardware import ProductShape, copied, products
from vitpar.sharded import local
from vitpar.training.build import TrainingComponents

READINGS = 7
LONG = 0.05  # seconds of a piece of work at least: ranks that share cores have to take turns on them, as in a step
COPIES = 2**20, 2**30  # bytes: a copy is as large as what an update reads and writes, within these
BACKWARD = 2  # products of backward for one of forward


@dataclass(frozen=True)
class PhaseLimits:
    """Lower limits of the time of a step's phases on one rank."""

    phases: dict[str, float]
    """Seconds per step by phase; phases without a limit are left out."""
    matmul_rate: float
    """FLOP/s of matrix products of a step's shapes."""
    bandwidth: float
    """Bytes per second that a copy reads and writes."""


def measure_limits(trained: TrainingComponents) -> PhaseLimits:
    """After a step at least, so that there is optimizer state. Collective: all ranks measure at the same time, as they
    train."""
    model = trained.model
    forward, backward = matmul_rates(model)
    flops = rank_flops(model)
    seconds = flops / (1 + BACKWARD) / forward, flops * BACKWARD / (1 + BACKWARD) / backward
    phases = {"pipeline": sum(seconds)}
    if model.plan.pipeline_degree == 1:
        phases = dict(zip(("forward", "backward"), seconds, strict=True))
    if sending := _sending(model):
        phases["waiting for gradients"] = sending
    norm, update = update_bytes(trained)
    size = min(max(update, COPIES[0]), COPIES[1])
    largest = torch.tensor(size, device=model.device)
    all_reduce_(largest, dist.ReduceOp.MAX)
    bandwidth = int(largest) / _seconds(model.device, copied(model.device, int(largest)))
    if not any(local(p).device != model.device for _, p in model.named_parameters()):
        # What is offloaded is updated by the host, whose memory was not measured.
        phases |= {"norm and clipping": norm / bandwidth, "update": update / bandwidth}
    return PhaseLimits(phases, flops / sum(seconds), bandwidth)


def rank_flops(model: ParallelModel) -> float:
    """FLOPs of a step that are this rank's share: its stages' layers, among the ranks of the stage."""
    names = [name for stage in model.stages.values() for name in stage.layers()]
    each = model.config.layer_flops
    return sum(each[name] for name in names) * model.batch_size / model.plan.stage_size


def matmul_rates(model: ParallelModel) -> tuple[float, float]:
    """FLOP/s of a rank in the products of a block's forward and backward. Collective."""
    shapes = block_products(model)
    flops = sum(2 * m * k * n for m, k, n in shapes)
    numbers, device = model.precision, model.device
    fast = E4M3 if numbers.float8 else numbers.compute
    outputs = products(device, fast, shapes)
    inputs = products(device, fast, [(m, n, k) for m, k, n in shapes], fast_sums=False)
    weights = products(device, numbers.compute, [(k, m, n) for m, k, n in shapes])

    def backward() -> None:
        inputs()
        weights()

    return flops / _seconds(device, outputs), BACKWARD * flops / _seconds(device, backward)


def block_products(model: ParallelModel) -> list[ProductShape]:
    """The four large products of the first block, as a rank has them in a micro-batch."""
    config, plan = model.config, model.plan
    parts = plan.strategies(config.layer_names)["blocks.0"].data_parallel
    tensor = plan.stage_size // parts
    rows = max(1, model.batch.microbatch_rows // parts) * config.tokens
    inner, hidden = config.embed_dim // tensor, config.mlp_hidden_dim // tensor
    qkv, projection = (rows, config.embed_dim, 3 * inner), (rows, inner, config.embed_dim)
    return [qkv, projection, (rows, config.embed_dim, hidden), (rows, hidden, config.embed_dim)]


def update_bytes(trained: TrainingComponents) -> tuple[int, int]:
    """Return the bytes that a rank reads and writes at least: for the norm and clipping of its gradients, and for the
    update."""
    parameters = _bytes(p for _, p in trained.model.named_parameters())
    state = _bytes(trained.optimizer.state().values())
    clips = bool(trained.recipe.train.clip_grad_norm or trained.scaler)
    average = 3 * parameters if trained.ema else 0  # the parameters are read, their average too, and written
    return parameters * (3 if clips else 1), 3 * parameters + 2 * state + average


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def _sending(model: ParallelModel) -> float:
    """Seconds of the messages that a step waits for, one after the other; 0 where no rank sends any. Collective."""
    largest = torch.zeros(max((size for _, size in model.gradient_messages), default=0) // 4 + 1, device=model.device)
    messages = [(group, largest[: max(1, size // 4)]) for group, size in model.gradient_messages]
    most = torch.tensor(len(messages), device=model.device)
    all_reduce_(most, dist.ReduceOp.MAX)

    def send() -> None:
        for group, message in messages:
            dist.all_reduce(message, group=group)

    return _seconds(model.device, send) if int(most) else 0.0


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """How long `work` takes, while all ranks do it again and again: for the slowest rank, when that was fastest, since
    what slows down some of the readings limits nothing. Collective."""
    group = ClockedRanks(device)

    def read(times: int) -> float:
        group.meet()
        begun = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return group.agree([(time.perf_counter() - begun) / times])[0][0]

    read(1)
    times = math.ceil(LONG / read(1))
    return min(read(times) for _ in range(READINGS))
