"""vitpar's side of every comparison: what its trainer does in a step, without data, logging and evaluation."""

import torch
from torch import Tensor

from bench.settings import CLIP, LR, OPTIMIZER, SEED, Step
from vitpar.models import ViTConfig
from vitpar.parallel import parallelize
from vitpar.strategy import Plan
from vitpar.train.optimizer import ShardedOptimizer
from vitpar.train.step import TrainStep


def vitpar_step(
    config: ViTConfig,
    plan: Plan,
    batch_size: int,
    device: torch.device,
    *,
    precision: str = "fp32",
    compile_blocks: bool = False,
) -> Step:
    """The step of ``vitpar.train.trainer.Trainer`` under `plan`."""
    model = parallelize(
        config,
        plan,
        batch_size=batch_size,
        device=device,
        precision_name=precision,
        seed=SEED,
        compile_blocks=compile_blocks,
    )
    update = TrainStep(model, ShardedOptimizer(model.named_parameters(), OPTIMIZER), clip_grad_norm=CLIP)

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        done = update(1, LR, images if model.takes_images else None, labels)
        return done.loss / model.sample_replicas, done.norm

    return step
