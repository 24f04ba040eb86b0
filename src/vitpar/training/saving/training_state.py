"""What a run needs to go on, on any plan: tensors by names that no plan changes, and a few numbers."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict

from torch import Tensor

from vitpar.checkpoint import Checkpoint, Facts, Scale, load_tensors
from vitpar.checkpoint.folder import STATE
from vitpar.checkpoint.names import AVERAGES, CONFIG, MOMENTS, PARAMETERS, PLAN, RECIPE
from vitpar.models.config import ViTConfig
from vitpar.parallel import ParallelModel
from vitpar.strategy import Plan, plan_text
from vitpar.training.optim.ema import EMA
from vitpar.training.optim.loss_scale import LossScaler
from vitpar.training.optim.optimizer import ShardedOptimizer, sharded_as
from vitpar.training.recipe import Recipe


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

    @property
    def loss_scale(self) -> Scale | None:
        """Of a loss that is scaled."""
        return Scale(**self._scaler.state()) if self._scaler else None

    def load(self, checkpoint: Checkpoint, changed: Collection[str] = ()) -> None:
        """Go on from `checkpoint`. Collective. Raises CheckpointError.

        changed: settings that are others than its, and may be. An optimizer that needs what the former one did not
        remember begins anew; averages that were not kept begin as the parameters.
        """
        there = checkpoint.index.tensors
        if any(name.startswith(MOMENTS) for name in there):  # else no step was made yet
            self._optimizer.allocate()
        wanted = self.tensors()
        other = any(key.startswith("optimizer.") for key in changed)
        if other and any(name not in there for name in wanted if name.startswith(MOMENTS)):
            self._optimizer.forget()
            wanted = self.tensors()
        no_averages = not any(name.startswith(AVERAGES) for name in there)
        if no_averages and "train.ema_decay" in changed:
            wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith(AVERAGES)}
        load_tensors(checkpoint.path, wanted, checkpoint.index)
        if self._ema and no_averages:
            self._ema.restart()
        self._model.parameters_changed()
        if self._scaler and checkpoint.facts.loss_scale:
            self._scaler.load_state(checkpoint.facts.loss_scale.model_dump())


def texts(facts: Facts, recipe: Recipe, config: ViTConfig, plan: Plan) -> dict[str, str]:
    """The files beside the tensors."""
    return {
        STATE: facts.model_dump_json(indent=1),
        RECIPE: recipe.to_toml(),
        CONFIG: json.dumps(asdict(config), indent=1),
        PLAN: plan_text(plan),
    }
