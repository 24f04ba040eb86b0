"""Lower limits on the time of a step's phases, from rates measured on the otherwise idle device.

| phase                  | limit                                                                                   |
|------------------------|-----------------------------------------------------------------------------------------|
| forward, backward      | FLOPs of the matrix products, at the measured rate of the products of the first block   |
| pipeline               | forward and backward, if no rank waits for another                                      |
| waiting for gradients  | the all-reduces of gradients, with nothing else running                                 |
| norm and clipping      | bytes of the gradients, at the rate of a copy                                           |
| update                 | bytes of parameters, gradients, optimizer state and averages, at the rate of a copy     |

Not counted: communication of tensor parallelism, pipelines and ``fully_shard``, recomputation in backward (+ckpt), and
the matrix products of Muon's update.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.launch.world_group import all_reduce_
from vitpar.models.derived import with_frozen
from vitpar.parallel import ParallelModel
from vitpar.parallel.float8 import E4M3, FAST
from vitpar.planner.measure.clock import ClockedRanks
from vitpar.planner.measure.hardware import ProductShape, copied, products
from vitpar.sharded import local
from vitpar.strategy.execution import multiplies_in_float8
from vitpar.training.build import TrainingComponents

READINGS = 7
"""Timed readings of a piece of work; the fastest counts."""
LONG = 0.05
"""Minimum seconds of a reading, so that ranks which share cores take turns on them, as in a step."""
COPIES = 2**20, 2**30
"""Smallest and largest copy measured, in bytes. Between them a copy is as large as the traffic of an update."""
BACKWARD = 2
"""Matrix products in backward for each in forward."""


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
    """Measure the limits of this rank's phases. Call it after at least one step, so that optimizer state exists.

    Collective: all ranks measure at the same time, so that they share links and cores as in a training.
    """
    model = trained.model
    forward, backward = matmul_rates(model)
    flops = rank_flops(model)
    seconds = flops[0] / forward, flops[1] / backward
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
        # The host updates offloaded parameters, and the bandwidth of its memory was not measured.
        phases |= {"norm and clipping": norm / bandwidth, "update": update / bandwidth}
    return PhaseLimits(phases, sum(flops) / sum(seconds), bandwidth)


def rank_flops(model: ParallelModel) -> tuple[float, float]:
    """Return this rank's share of the FLOPs of a step in (forward, backward): its stages' over the ranks of a stage."""
    names = [name for stage in model.stages.values() for name in stage.layers()]
    each = with_frozen(model.config, model.execution.frozen).layers
    share = model.batch_size / model.plan.stage_size
    forward = sum(model.config.layer_flops[name] for name in names) / (1 + BACKWARD)
    return share * forward, share * (sum(each[name].flops for name in names) - forward)


def matmul_rates(model: ParallelModel) -> tuple[float, float]:
    """Return the FLOP/s of a rank in the matrix products of a block's forward and of its backward. Collective."""
    numbers, device, execution = model.precision, model.device, model.execution
    fast, block_shapes = FAST[execution.fp8_fast_accum], block_products(model)
    outputs, inputs, weights = [], [], []
    for (m, k, n), float8 in block_shapes:
        dtype = E4M3 if float8 else numbers.compute
        outputs.append(products(device, dtype, [(m, k, n)], fast.output))
        inputs.append(products(device, dtype, [(m, n, k)], fast.gradient))
        weights.append(products(device, numbers.compute, [(k, m, n)]))
    flops = sum(2 * math.prod(shape) for shape, _ in block_shapes)

    def forward() -> None:
        for work in outputs:
            work()

    def backward() -> None:
        for work in (*inputs, *weights):
            work()

    return flops / _seconds(device, forward), BACKWARD * flops / _seconds(device, backward)


def block_products(model: ParallelModel) -> list[tuple[ProductShape, bool]]:
    """Return the first block's matrix products on one rank for one micro-batch: shapes (m, k, n), whether in float8."""
    config, plan = model.config, model.plan
    block = config.blocks[0]
    parts = plan.strategies(config.layer_names)[block].data_parallel
    tensor = plan.stage_size // parts
    images, shapes = max(1, model.batch.microbatch_rows // parts), []
    for part in config.layers[block].parts:
        if part.product is not None:
            taken, given = part.product
            split = (taken // tensor, given) if part.role in ("row", "row_a") else (taken, given // tensor)
            if part.role in ("column_a", "row_b"):
                split = taken, given
            float8 = (
                model.precision.float8
                and not part.adapts
                and multiplies_in_float8(taken, given, model.execution.fp8_min_features)
            )
            shapes.append(((images * part.tokens, *split), float8))
    return shapes


def update_bytes(trained: TrainingComponents) -> tuple[int, int]:
    """Return the minimum bytes that a rank reads and writes for norm and clipping, and for the update."""
    parameters = _bytes(p for _, p in trained.model.named_parameters() if p.requires_grad)
    state = _bytes(trained.optimizer.state().values())
    # One pass clips in the update. It also writes 16-bit copies, which are small beside the rest.
    clips = bool(trained.recipe.train.clip_grad_norm or trained.scaler) and not trained.optimizer.one_pass
    # Averaging reads the parameters and their average, and writes the average.
    average = 3 * parameters if trained.ema else 0
    return parameters * (3 if clips else 1), 3 * parameters + 2 * state + average


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def _sending(model: ParallelModel) -> float:
    """Return the seconds of a step's gradient all-reduces, one after the other; 0 if no rank has any. Collective."""
    largest = torch.zeros(max((size for _, size in model.gradient_messages), default=0) // 4 + 1, device=model.device)
    messages = [(group, largest[: max(1, size // 4)]) for group, size in model.gradient_messages]
    most = torch.tensor(len(messages), device=model.device)
    all_reduce_(most, dist.ReduceOp.MAX)

    def send() -> None:
        for group, message in messages:
            dist.all_reduce(message, group=group)

    return _seconds(model.device, send) if int(most) else 0.0


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of `work` on the slowest rank, while all ranks repeat it. Collective.

    The fastest reading counts, because disturbances that slow down some readings are not a limit.
    """
    group = ClockedRanks(device)

    def read(times: int) -> float:
        group.meet()
        begun = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return group.agree([(time.perf_counter() - begun) / times])[0]

    read(1)
    times = math.ceil(LONG / read(1))
    return min(read(times) for _ in range(READINGS))
