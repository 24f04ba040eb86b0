"""What a run needs to go on, on any plan: tensors by names that no plan changes, and a few numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from torch import Tensor

from vitpar.checkpoint import Checkpoint, load_tensors, sharded_as
from vitpar.checkpoint.folder import STATE
from vitpar.models.config import ViTConfig
from vitpar.parallel import ParallelModel
from vitpar.strategy import Plan, plan_text
from vitpar.train.ema import EMA
from vitpar.train.loss_scale import LossScaler
from vitpar.train.optimizer import ShardedOptimizer
from vitpar.train.recipe import Recipe

RECIPE, PLAN, CONFIG = "recipe.toml", "plan.json", "config.json"
PARAMETERS, MOMENTS, AVERAGES = "model.", "optimizer.", "ema."


def averages(model: ParallelModel, ema: EMA) -> dict[str, Tensor]:
    """The running averages, sharded as their parameters."""
    return {name: sharded_as(p.detach(), ema.average[name]) for name, p in model.named_parameters()}


class TrainingState:
    """Model, optimizer, averages and loss scale of a run: all that its steps change.

    Nothing random is kept: initial values, order, augmentation and drop-path are functions of the seed and of the place
    in the data.
    """

    def __init__(
        self, model: ParallelModel, optimizer: ShardedOptimizer, ema: EMA | None, scaler: LossScaler | None
    ) -> None:
        self._model, self._optimizer, self._ema, self._scaler = model, optimizer, ema, scaler

    def tensors(self) -> dict[str, Tensor]:
        """Those of this rank, sharing their memory: `model.…`, `optimizer.exp_avg.…`, `ema.…`."""
        parameters = {f"{PARAMETERS}{name}": p.detach() for name, p in self._model.named_parameters()}
        moments = {f"{MOMENTS}{name}": tensor for name, tensor in self._optimizer.state().items()}
        means = averages(self._model, self._ema) if self._ema else {}
        return parameters | moments | {f"{AVERAGES}{name}": tensor for name, tensor in means.items()}

    def texts(
        self, step: int, samples: int, fingerprint: str, recipe: Recipe, config: ViTConfig, plan: Plan
    ) -> dict[str, str]:
        """The files beside them. samples: of the training set, seen so far. fingerprint: of the training set."""
        facts: dict[str, Any] = {"step": step, "samples": samples, "data": fingerprint}
        facts["loss_scale"] = self._scaler.state() if self._scaler else None
        return {
            STATE: json.dumps(facts, indent=1),
            RECIPE: recipe.to_toml(),
            CONFIG: json.dumps(asdict(config), indent=1),
            PLAN: plan_text(plan),
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from `checkpoint`. Collective. Raises CheckpointError."""
        if any(name.startswith(MOMENTS) for name in checkpoint.index.tensors):  # else no step was made yet
            self._optimizer.allocate()
        load_tensors(checkpoint.path, self.tensors(), checkpoint.index)
        self._model.parameters_changed()
        if self._scaler and checkpoint.facts["loss_scale"]:
            self._scaler.load_state(checkpoint.facts["loss_scale"])
