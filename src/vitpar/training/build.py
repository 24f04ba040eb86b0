"""Components of a training: the model under its plan and all that takes part in a step, built from a recipe, to train
or to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vitpar.models.config import ViTConfig
from vitpar.parallel import Communication, ParallelModel, parallelize
from vitpar.parallel.attention import AttentionChoice, choose_attention
from vitpar.parallel.compiling import choose_compiling
from vitpar.parallel.precision import slow_here
from vitpar.strategy import Plan
from vitpar.strategy.execution import Execution
from vitpar.training.faults.non_finite import NonFinite
from vitpar.training.optim.loss_scale import LossScaler
from vitpar.training.optim.optimizer import EMA, ShardedOptimizer
from vitpar.training.recipe import Recipe
from vitpar.training.recipe.machine import resolve_precision
from vitpar.training.step import TrainStep, nothing


@dataclass(frozen=True)
class TrainingComponents:
    """The parts of one rank. scaler: of the loss, in fp16 alone. ema: the averaged parameters, where the recipe wants
    them. warnings: what makes steps slower than they would be elsewhere."""

    recipe: Recipe
    model: ParallelModel
    optimizer: ShardedOptimizer
    scaler: LossScaler | None
    non_finite: NonFinite
    ema: EMA | None
    warnings: tuple[str, ...]

    def choose_attention(self, kept: str | None = None) -> AttentionChoice:
        """``vitpar.parallel.attention.choose_attention`` for the recipe. Collective. Raises RecipeError."""
        model, train = self.model, self.recipe.train
        shape = (model.config, model.plan, train.batch_size, model.precision, model.device)
        return choose_attention(train.attention, *shape, kept=kept)

    def step(
        self,
        after_gradients: Callable[[int], None] = nothing,
        before_update: Callable[[], None] = nothing,
    ) -> TrainStep:
        """Their steps. The arguments are those of `TrainStep`."""
        return TrainStep(
            self.model,
            self.optimizer,
            clip_grad_norm=self.recipe.train.clip_grad_norm,
            scaler=self.scaler,
            ema=self.ema,
            non_finite=self.non_finite,
            after_gradients=after_gradients,
            before_update=before_update,
        )


def execution(recipe: Recipe, plan: Plan, compile_blocks: bool) -> Execution:
    """Return the settings of `recipe` that decide how steps of `plan` are executed."""
    train = recipe.train
    return Execution(
        batch_size=train.batch_size,
        precision=train.precision,
        reduce_dtype=train.reduce_dtype,
        seed=train.seed,
        label_smoothing=train.label_smoothing,
        compile=compile_blocks,
        activation_memory_budget=train.activation_memory_budget,
        communication=Communication(**recipe.communication_under(plan).model_dump()),
    )


def build(recipe: Recipe, config: ViTConfig, plan: Plan, device: torch.device) -> TrainingComponents:
    """The parts that `recipe` asks for, with initial values. Collective.

    config: ``recipe.config`` for the data's classes. plan: validated against it and the recipe's batch. Raises
    RecipeError where blocks are to be compiled and cannot be.
    """
    recipe = resolve_precision(recipe, device.type)
    train = recipe.train
    wanted = False if recipe.faults.debug_checks else train.compile  # the checks look into blocks
    compiling = choose_compiling(wanted, plan, train.precision, device)
    model = parallelize(config, plan, execution(recipe, plan, compiling.blocks), device)
    optimizer = ShardedOptimizer(model.named_parameters(), recipe.optimizer, heads=config.num_heads)
    scaler = LossScaler(recipe.loss_scale) if model.precision.scales_loss else None
    ema = EMA(model, train.ema_decay, train.ema_warmup) if train.ema_decay else None
    because = compiling.because and f"blocks are not compiled: {compiling.because}"
    warnings = tuple(filter(None, (because, slow_here(train.precision, device))))
    return TrainingComponents(recipe, model, optimizer, scaler, NonFinite(recipe, model, scaler), ema, warnings)
