"""Recipes: model, data, optimizer, training and parallel settings, checked before anything starts, and what follows
from them. ``vitpar.training.recipe.file`` reads them; the merged recipe is written into the run folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import ValidationError, model_validator

from vitpar.errors import RecipeError, shown
from vitpar.models.config import ViTConfig, model_config
from vitpar.strategy import Plan, parse, read_plan, validate
from vitpar.strategy.support import refuse_clashes, refuse_unused
from vitpar.training.optim.loss_scale import LossScaleSection
from vitpar.training.recipe.optimizer_section import Implementation as Implementation
from vitpar.training.recipe.optimizer_section import OptimizerSection
from vitpar.training.recipe.plan_choice import Chosen, first_that_fits
from vitpar.training.recipe.sections import (
    AugmentSection,
    CheckpointSection,
    CommunicationSection,
    DataSection,
    FaultsSection,
    LRScheduleSection,
    ModelSection,
    ParallelSection,
    Section,
    StreamSection,
    TrainSection,
)

STREAM_CANNOT = {"augment.repeats": 1, "augment.mixup": 0, "augment.cutmix": 0, "data.shuffle_window": 0}
"""Settings that a stream has only the one value of."""


class Recipe(Section):
    """One experiment, all settings in place."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    augment: AugmentSection = AugmentSection()
    stream: StreamSection = StreamSection()
    optimizer: OptimizerSection = OptimizerSection()
    lr_schedule: LRScheduleSection = LRScheduleSection()
    train: TrainSection = TrainSection()
    loss_scale: LossScaleSection = LossScaleSection()
    checkpoint: CheckpointSection = CheckpointSection()
    faults: FaultsSection = FaultsSection()
    parallel: ParallelSection = ParallelSection()
    communication: CommunicationSection = CommunicationSection()

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        if self.data.path is None and not self.stream:
            raise ValueError(
                "the recipe lacks 'data.path': name a folder made by 'vitpar data pack' with --data DIR, or shards to "
                "stream in [stream]"
            )
        if not self.stream:
            return self
        if self.data.path is not None:
            raise ValueError(f"both data.path '{shown(self.data.path)}' and [stream] are given: keep one")
        for key, plain in STREAM_CANNOT.items():
            section, _, name = key.partition(".")
            if (value := getattr(getattr(self, section), name)) != plain:
                raise ValueError(f"{key} is {value}, which a stream cannot do: leave it out, or index the shards")
        return self

    @property
    def data_name(self) -> str:
        """Where training data comes from, for people."""
        train = self.stream.train if self.data.path is None else self.data.path
        assert train is not None
        return train if isinstance(train, str) else ", ".join(train)

    @model_validator(mode="after")
    def _rate_falls(self) -> Self:
        if self.lr_schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"lr_schedule.min_lr {self.lr_schedule.min_lr} is above optimizer.lr {self.optimizer.lr}: lower it"
            )
        return self

    @model_validator(mode="after")
    def _loss_scale_is_used(self) -> Self:
        if self.train.precision != "fp16":
            for name, field in LossScaleSection.model_fields.items():
                if (value := getattr(self.loss_scale, name)) != field.default:
                    raise ValueError(
                        f"loss_scale.{name} is {value}, which does nothing with train.precision "
                        f"'{self.train.precision}': leave it out, or set train.precision to fp16"
                    )
        return self

    @model_validator(mode="after")
    def _faults_can_be_watched(self) -> Self:
        if self.train.precision == "fp16" and self.faults.non_finite == "skip":
            raise ValueError(
                "faults.non_finite is 'skip', which train.precision fp16 does anyway, under [loss_scale]: leave it out"
            )
        if self.train.compile and self.faults.debug_checks:
            raise ValueError(
                "faults.debug_checks cannot look into compiled blocks: set train.compile to false while you search"
            )
        return self

    def config(self, num_classes: int) -> ViTConfig:
        """The model's shape for data of `num_classes` classes. Raises ModelError."""
        fields = self.model.model_dump(exclude_none=True, exclude={"weights"})
        return model_config(fields.pop("name"), num_classes=num_classes, **fields)

    def with_precision(self, name: str) -> Self:
        """The same in the precision `name`, where train.precision is auto. Raises RecipeError for settings that do
        nothing in it."""
        if self.train.precision != "auto":
            return self
        train = self.train.model_dump(exclude_unset=True) | {"precision": name}
        try:
            return self.model_copy(update={"train": TrainSection.model_validate(train)})
        except ValidationError as error:
            raise RecipeError(str(error.errors()[0]["ctx"]["error"])) from None

    def plan(self, config: ViTConfig, resolve: Callable[[Plan], Plan] = lambda plan: plan) -> Plan:
        """The plan of `parallel.mesh`, validated against the model and the batch. Raises StrategyError.

        resolve: fills the open degree, if the strategy leaves one, for the ranks there are.
        """
        return self._choose(self.requested_plans()[:1], config, resolve).plan

    def chosen(self, config: ViTConfig, resolve: Callable[[Plan], Plan]) -> Chosen:
        """The same, or where that does not fit, the first of `parallel.otherwise` that does. Raises StrategyError."""
        return self._choose(self.requested_plans(), config, resolve)

    def _choose(self, wanted: Sequence[Plan], config: ViTConfig, resolve: Callable[[Plan], Plan]) -> Chosen:
        precision = self.train.precision

        def fit(plan: Plan) -> Plan:
            fitting = validate(resolve(plan), config, self.train.batch_size)
            refuse_clashes(fitting, precision, bool(self.train.compile))
            # Settings that the first plan uses may well do nothing under the others.
            communication = self.communication if plan is wanted[0] else self.communication.used_by(fitting, precision)
            refuse_unused(fitting, precision, communication.model_dump())
            return fitting

        return first_that_fits(wanted, fit)

    def requested_plans(self) -> list[Plan]:
        """What `parallel.mesh` says, which may be the name of a JSON file with a whole plan, then `parallel.otherwise`.
        Raises StrategyError."""
        fields = self.parallel.model_dump()
        mesh, otherwise = fields.pop("mesh"), fields.pop("otherwise")
        if not mesh.endswith(".json"):
            return [replace(parse(mesh), **fields), *(_alternative(parse(other), fields) for other in otherwise)]
        if not self.parallel.model_fields_set <= {"mesh", "otherwise"}:
            raise RecipeError(
                f"'{shown(mesh)}' is a whole plan: leave out the other settings of [parallel], or change the file"
            )
        return [read_plan(Path(mesh)), *map(parse, otherwise)]

    def total_steps(self, samples: int) -> int:
        """Optimizer steps of the run over a training set of `samples`: what covers the epochs asked for."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.epochs is not None
        return math.ceil(self.train.epochs * samples / self.train.batch_size)

    def warmup_steps(self, samples: int) -> int:
        """Steps of linear warm-up."""
        if self.lr_schedule.warmup_steps is not None:
            return self.lr_schedule.warmup_steps
        return round((self.lr_schedule.warmup_epochs or 0) * samples / self.train.batch_size)

    def to_toml(self) -> str:
        """The whole recipe, defaults included, as a file that `read_recipe` takes."""
        values = self.model_dump(exclude_none=True, mode="json")
        if self.train.precision != "fp16":
            del values["loss_scale"]
        if not self.stream:
            del values["stream"]
        if self.parallel.mesh.endswith(".json"):  # a whole plan, beside which no other setting of one may stand
            values["parallel"] = {
                key: values["parallel"][key] for key in ("mesh", "otherwise") if values["parallel"][key]
            }
        return tomli_w.dumps(values)


def _alternative(plan: Plan, fields: Mapping[str, Any]) -> Plan:
    """`plan` with the settings of [parallel] that are not only for a pipeline it lacks."""
    kept = fields if plan.pp != 1 else {name: fields[name] for name in ("microbatches", "microbatch_size")}
    return replace(plan, **kept)
