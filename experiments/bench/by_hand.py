"""Hand-written counterparts of the plans: each as an engineer would write it for one case, after PyTorch's tutorials.

All train the same ``vitpar.models.layers.LayeredModel``, without vitpar's parallel layers, from the same initial
parameters.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bench.plain_loop import adamw, initial_model, plain_step
from bench.settings import CLIP, Step, decay_groups
from vitpar.models import ViTConfig

MICROBATCHES = 4


def ddp(config: ViTConfig) -> Step:
    """Return a step of DistributedDataParallel, which averages the gradients during backward."""
    return plain_step(DistributedDataParallel(initial_model(config), gradient_as_bucket_view=True))


def fsdp(config: ViTConfig) -> Step:
    """Return a step with ``fully_shard`` applied to every block and to the root."""
    model = initial_model(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_step(model)


def pipeline(config: ViTConfig) -> Step:
    """Return a step of a 1F1B pipeline: each rank holds an equal share of the blocks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names, per_stage = config.layer_names, config.depth // ranks
    begin, end = (1 + per_stage * n for n in (rank, rank + 1))
    model = initial_model(config, layers=names[begin - (rank == 0) : end + (rank == ranks - 1)])
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.cross_entropy)
    optimizer = adamw(decay_groups(model))

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(images)
        else:
            schedule.step(target=labels, losses=losses)
        gradients = [p.grad for p in model.parameters()]
        square = get_total_norm(gradients).square()
        dist.all_reduce(square)
        norm = square.sqrt()
        clip_grads_with_norm_(model.parameters(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(()), norm

    return step


def tensor(config: ViTConfig) -> Step:
    """Return a step with attention heads and MLP features sharded; the other parameters are replicated."""
    model = initial_model(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():
        parallelize_module(
            block,
            mesh,
            {
                "attn.qkv": ColwiseParallel(),
                "attn.proj": RowwiseParallel(),
                "mlp.fc1": ColwiseParallel(),
                "mlp.fc2": RowwiseParallel(),
            },
        )
    # Fused kernels and norms cannot mix DTensors with plain tensors: keep them in separate lists and groups.
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [
        {**group, "params": [p for p in group["params"] if isinstance(p, DTensor) is kind]}
        for group in decay_groups(model)
        for kind in (True, False)
    ]
    optimizer = adamw([group for group in groups if group["params"]])
    ranks = dist.get_world_size()

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        norms = [get_total_norm([p.grad for p in part]) for part in (split, whole)]
        norm = torch.stack([norms[0].full_tensor(), norms[1]]).norm()
        for part in (split, whole):
            clip_grads_with_norm_(part, CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() / ranks, norm

    return step


BY_HAND: dict[str, Callable[[ViTConfig], Step]] = {
    "one": lambda config: plain_step(initial_model(config)),
    "dp2": ddp,
    "fsdp2": fsdp,
    "pp2": pipeline,
    "tp2": tensor,
    "host": lambda config: plain_step(initial_model(config), precision="bf16"),
}
"""Functions that build the hand-written step, by name of the case."""
