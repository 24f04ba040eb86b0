"""vitpar's side of every comparison: a training step without data loading, logging and evaluation."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.settings import CLIP, LR, OPTIMIZER, SEED
from vitpar.models.config import ModelConfig
from vitpar.parallel import Execution, ParallelModel, parallelize
from vitpar.parallel.attention import AttentionChoice, choose_attention
from vitpar.parallel.precision import resolve_precision as numbers
from vitpar.strategy import Plan
from vitpar.strategy.execution import FP8_MIN_FEATURES, FastAccum
from vitpar.training.optim.one_pass import choose_implementation
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.step import TrainStep, nothing


class VitparStep:
    """The training step of ``vitpar.training.trainer.Trainer`` as a ``bench.settings.Step``."""

    def __init__(self, model: ParallelModel, attention: AttentionChoice, before_update: Callable[[], object]) -> None:
        self.model, self.attention = model, attention
        implementation = choose_implementation(OPTIMIZER, model.execution.precision, model.device).name
        self.optimizer = ShardedOptimizer(model.named_parameters(), OPTIMIZER, implementation=implementation)
        self._update = TrainStep(model, self.optimizer, clip_grad_norm=CLIP, before_update=before_update)

    def __call__(self, images: Tensor, labels: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        done = self._update(1, LR, images if self.model.takes_images else None, labels, keys)
        return done.loss, done.norm


def vitpar_step(
    config: ModelConfig,
    plan: Plan,
    batch_size: int,
    device: torch.device,
    *,
    precision: str = "fp32",
    compile_blocks: bool = False,
    kernel: str = "auto",
    fp8_min_features: int = FP8_MIN_FEATURES,
    fp8_fast_accum: FastAccum = "forward",
    before_update: Callable[[], object] = nothing,
) -> VitparStep:
    """Build a model under `plan` and return its step.

    kernel: attention kernel, as in ``train.attention``. The choice holds for the whole process, so a second step must
    pass the kernel of the first.
    fp8_min_features, fp8_fast_accum: as in the recipe's section [train].
    before_update: called in each step before parameters change.
    """
    attention = choose_attention(kernel, config, plan, batch_size, numbers(precision), device)
    execution = Execution(
        batch_size,
        precision,
        seed=SEED,
        compile=compile_blocks,
        fp8_min_features=fp8_min_features,
        fp8_fast_accum=fp8_fast_accum,
    )
    model = parallelize(config, plan, execution, device)
    return VitparStep(model, attention, before_update)
