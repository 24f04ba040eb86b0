"""Recipes: settings of model, data, optimizer, training and plan, checked before anything starts.

``vitpar.recipe.file`` reads them. The merged recipe is written to the run folder.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import model_validator

from vitpar.errors import RecipeError, StrategyError
from vitpar.intervals import NOTHING
from vitpar.models.config import ModelConfig, field_names
from vitpar.models.description import layer_of
from vitpar.models.families import family_of, model_config
from vitpar.models.lora import LoRA, adapted
from vitpar.recipe.effects import STREAM_CANNOT, idle_settings
from vitpar.recipe.rates.schedules import LRSchedule
from vitpar.recipe.rates.shapes import RunLengths, parse_shape
from vitpar.recipe.sections import Section
from vitpar.recipe.sections.input import CLASSIFY, AugmentSection, DataSection, ModelSection, StreamSection, TaskSection
from vitpar.recipe.sections.running import (
    AUTO,
    CheckpointSection,
    CommunicationSection,
    FaultsSection,
    ParallelSection,
    TrackSection,
)
from vitpar.recipe.sections.training import (
    DistillSection,
    LoraSection,
    LossScaleSection,
    LRScheduleSection,
    OptimizerSection,
    TrainSection,
)
from vitpar.strategy import Plan, parse, validate
from vitpar.strategy.execution import REDUCE_DTYPES
from vitpar.strategy.freezing import listed_parameters, parameter_names, split_entries
from vitpar.strategy.plan_json import read_plan
from vitpar.strategy.support import refuse_apart, refuse_clashes
from vitpar.text import shown


@dataclass(frozen=True)
class Chosen:
    """Plan that was chosen among alternatives."""

    plan: Plan
    """First plan that fits."""
    because: str | None = None
    """Why it is not the first alternative, as one sentence; None if it is."""


class Recipe(Section):
    """All settings of a training."""

    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    augment: AugmentSection = AugmentSection()
    stream: StreamSection = StreamSection()
    optimizer: OptimizerSection = OptimizerSection()
    lr_schedule: LRScheduleSection = LRScheduleSection()
    lora: LoraSection = LoraSection()
    train: TrainSection = TrainSection()
    distill: DistillSection = DistillSection()
    loss_scale: LossScaleSection = LossScaleSection()
    checkpoint: CheckpointSection = CheckpointSection()
    faults: FaultsSection = FaultsSection()
    parallel: ParallelSection = ParallelSection()
    communication: CommunicationSection = CommunicationSection()
    track: TrackSection = TrackSection()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        """Raise RecipeError for settings that contradict others."""
        train, data, optimizer, cache = self.train, self.data.path, self.optimizer, self.data.cache
        low = REDUCE_DTYPES.get("bf16" if train.precision == "auto" else train.precision)
        if train.reduce_dtype not in (None, "fp32", low):
            raise RecipeError(
                f"train.reduce_dtype is '{train.reduce_dtype}', which train.precision '{train.precision}' does not "
                f"support: use 'fp32' or '{low}'"
            )
        if data is None and not self.stream:
            raise RecipeError(
                "the recipe lacks 'data.path': name a folder made by `vitpar data pack` with --data DIR, or shards to "
                "stream in [stream]"
            )
        if data is not None and self.stream:
            raise RecipeError(f"both data.path '{shown(data)}' and [stream] are given: keep one")
        for key in STREAM_CANNOT if self.stream else ():
            section, _, name = key.partition(".")
            settings = getattr(self, section)
            if (value := getattr(settings, name)) != type(settings).model_fields[name].default:
                raise RecipeError(
                    f"{key} is {value}, which a stream does not support: leave it out, or index the shards"
                )
        supported = {"adamw": ("fused", "triton"), "adam": ("fused",), "sgd": ("fused",)}.get(optimizer.name, ())
        if optimizer.implementation not in ("auto", "foreach", *supported, *(["for-loop"] if supported else [])):
            raise RecipeError(
                f"optimizer.implementation is '{optimizer.implementation}', which {optimizer.name} does not support: "
                "use auto"
            )
        if self.data.decode != "host" and (cache != "none" or self.data.crop_padding is not None):
            raise RecipeError(
                f"data.decode is '{self.data.decode}', which needs data.cache none and no data.crop_padding: leave it "
                "out, or change these"
            )
        if self.data.bad_sample == "skip" and cache == "device":
            raise RecipeError(
                "data.bad_sample is 'skip', but data.cache 'device' decodes all images at the start and stops at a bad "
                "one: leave it out, or set data.cache to memory"
            )
        if self.distill.teacher is not None and self.task.name != CLASSIFY:
            raise RecipeError(
                f"distill.teacher is '{shown(self.distill.teacher)}', but task '{self.task.name}' has no classes to "
                "learn from a teacher: leave it out, or use task classify"
            )
        if self.lr_schedule.min_lr > self.lr:
            raise RecipeError(f"lr_schedule.min_lr {self.lr_schedule.min_lr} is above optimizer.lr {self.lr}: lower it")
        for key, listed in (("train.freeze", train.freeze), ("lora.train", self.lora.train)):
            try:
                split_entries(listed or "embed")
            except StrategyError as error:
                raise RecipeError(f"{key}: {error}") from None
        if train.image_sizes is not None and self.distill.teacher is not None:
            raise RecipeError(
                f"train.image_sizes is '{shown(train.image_sizes)}', but a teacher takes images of one size: leave out "
                "one of the two"
            )
        if train.image_sizes is not None and self.data.crop_padding is not None:
            raise RecipeError(
                "train.image_sizes needs crops that are resized, but data.crop_padding takes them as they are: leave "
                "out one of the two"
            )
        if self.lora.rank is not None and train.freeze is not None:
            raise RecipeError(
                "train.freeze does nothing with [lora], which freezes all but adapters: list what is trained besides "
                "them in lora.train"
            )
        if train.compile and self.faults.debug_checks:
            raise RecipeError("faults.debug_checks cannot check compiled blocks: set train.compile to false")
        return self

    def __repr__(self) -> str:
        changed = self.model_dump(exclude_defaults=True, mode="json").items()
        return f"Recipe({', '.join(f'{name}={settings}' for name, settings in changed if settings)})"

    def flat(self) -> dict[str, Any]:
        """Return all settings as JSON values, by dotted key."""
        values = self.model_dump(mode="json")
        return {f"{section}.{key}": value for section, settings in values.items() for key, value in settings.items()}

    def updated(self, **changes: Mapping[str, Any]) -> Self:
        """Return the recipe with changed settings, by section and name. They are not validated."""
        sections = {name: getattr(self, name).model_copy(update=settings) for name, settings in changes.items()}
        return self.model_copy(update=sections)

    @property
    def data_name(self) -> str:
        """Source of the training data, for messages."""
        train = self.stream.train if self.data.path is None else self.data.path
        assert train is not None
        return train if isinstance(train, str) else ", ".join(train)

    def config(self, num_classes: int, usual: Mapping[str, Any] = {}) -> ModelConfig:
        """Return the configuration of the model with `num_classes` outputs (``Task.outputs``). Raises ModelError.

        usual: further fields, for those that the recipe does not set (``Task.model_options``).
        """
        fields = self.model.model_dump(exclude_none=True, exclude={"weights"})
        known, own = field_names(family_of(fields["name"])), fields.pop("options", {})
        fields = {**{name: value for name, value in usual.items() if name in known}, **fields, **own}
        config = model_config(fields.pop("name"), num_classes=num_classes, **fields)
        lora = self.lora
        return config if lora.rank is None else adapted(config, lora.rank, lora.alpha, lora.targets)

    def frozen(self, config: ModelConfig) -> frozenset[str]:
        """Return the names of the parameters that are not trained: by `train.freeze`, or of a model with adapters.

        Raises RecipeError if the model lacks one, if none is left, or if a shared one freezes only in some layers.
        """
        if isinstance(config, LoRA):
            setting = f"lora.train '{self.lora.train}'"
            frozen = frozenset(parameter_names(config.whole)) - self._trained_besides(config.whole)
        elif self.train.freeze is not None:
            setting, frozen = f"train.freeze '{self.train.freeze}'", _listed("train.freeze", self.train.freeze, config)
        else:
            return frozenset()
        if len(frozen) == len(parameter_names(config)):
            raise RecipeError(f"{setting} freezes all layers: leave out one, such as head")
        for owner, names in config.holders.items():
            if (sharing := {*names}) & frozen and sharing - frozen:
                one, other = min(map(layer_of, sharing & frozen)), min(map(layer_of, sharing - frozen))
                raise RecipeError(
                    f"{setting} freezes {one} but not {other}, which share {owner}: freeze all layers that share it, "
                    "or none"
                )
        return frozen

    def _trained_besides(self, config: ModelConfig) -> frozenset[str]:
        """Return the names of the parameters of `config` that are trained besides adapters."""
        if self.lora.train is not None:
            return _listed("lora.train", self.lora.train, config) if self.lora.train.strip() else frozenset()
        of_head = (name for name in parameter_names(config) if layer_of(name) == config.last_layer.name)
        shared = {name for names in config.holders.values() if len(names) > 1 for name in names}
        return frozenset(of_head) - shared

    def with_precision(self, name: str) -> Self:
        """Return the recipe in the precision `name` instead of auto. Raises RecipeError for clashes with it."""
        if self.train.precision != "auto":
            return self
        return self.updated(train={"precision": name})._refuse_contradictions()  # type: ignore[operator]  # a method again, which mypy does not know

    def plan(self, config: ModelConfig, resolve: Callable[[Plan], Plan] = lambda plan: plan) -> Plan:
        """Return the plan of `parallel.mesh`, validated against the model and the batch.

        resolve: fills the open degree, if the strategy has one, for the number of ranks.

        Raises StrategyError, and RecipeError for frozen parameters that the model lacks.
        """
        return self._choose(self.requested_plans()[:1], config, resolve).plan

    def chosen(self, config: ModelConfig, resolve: Callable[[Plan], Plan]) -> Chosen:
        """Return the plan of `parallel.mesh` or, if it does not fit, the first of `parallel.fallback_meshes` that does.

        Raises StrategyError.
        """
        return self._choose(self.requested_plans(), config, resolve)

    def _choose(self, wanted: Sequence[Plan], config: ModelConfig, resolve: Callable[[Plan], Plan]) -> Chosen:
        self.frozen(config)  # refuses parameters that the model lacks

        def fit(plan: Plan) -> Plan:
            fitting = validate(resolve(plan), config, self.train.batch_size)
            self.refuse_clashes(fitting)
            return fitting

        return first_that_fits(wanted, fit)

    def refuse_clashes(self, plan: Plan) -> None:
        """Raise StrategyError for settings that clash under `plan`."""
        refuse_clashes(plan, self.train.precision, bool(self.train.compile))
        refuse_apart(plan, self.communication.reduce_every_microbatch)

    def under(self, plan: Plan) -> Self:
        """Return the recipe for training under `plan`, which [parallel] describes."""
        return self.model_copy(update={"parallel": ParallelSection.of(plan)})

    def requested_plans(self) -> list[Plan]:
        """Return the plans of `parallel.mesh`, also of a plan.json, and of its fallbacks. Raises StrategyError."""
        fields = self.parallel.model_dump()
        mesh, fallbacks = fields.pop("mesh"), fields.pop("fallback_meshes")
        if mesh == AUTO:
            raise StrategyError(
                f"parallel.mesh is '{AUTO}', which only `vitpar train` supports: name a strategy, such as one that "
                "`vitpar search` finds"
            )
        if not mesh.endswith(".json"):
            plans = [replace(parse(mesh), **fields)]
            for plan in map(parse, fallbacks):  # one without a pipeline has no settings of pipelines
                kept = fields if plan.pp != 1 else {name: fields[name] for name in ("microbatches", "microbatch_size")}
                plans.append(replace(plan, **kept))
            return plans
        if not self.parallel.model_fields_set <= {"mesh", "fallback_meshes"}:
            raise RecipeError(
                f"'{shown(mesh)}' is a complete plan: leave out the other settings of [parallel], or change the file"
            )
        return [read_plan(Path(mesh)), *map(parse, fallbacks)]

    @property
    def lr(self) -> float:
        """Largest learning rate, for the batch size of the recipe."""
        optimizer, size = self.optimizer, self.train.batch_size
        ratio = size / (optimizer.lr_batch_size or size)
        return optimizer.lr * (ratio if optimizer.lr_scaling == "linear" else math.sqrt(ratio))

    def total_steps(self, samples: int) -> int:
        """Return the optimizer steps of a run on a training set of `samples`: those given, or enough for the epochs."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.epochs is not None
        return math.ceil(self.train.epochs * samples / self.train.batch_size)

    def with_batch_size(self, images: int) -> Self:
        """Return the recipe with another batch size, and lengths in steps that see as many images as before."""
        ratio = Fraction(self.train.batch_size, images)
        steps, warmup = self.train.steps, self.lr_schedule.warmup
        steps, warmup = steps and math.ceil(steps * ratio), warmup and warmup.scaled(ratio)
        return self.updated(train={"batch_size": images, "steps": steps}, lr_schedule={"warmup": warmup})

    def lengths(self, samples: int) -> RunLengths:
        """Return the lengths of a run on a training set, which intervals refer to."""
        return RunLengths(samples, self.train.batch_size, self.total_steps(samples))

    def learning_rate(self, samples: int) -> LRSchedule:
        """Return the learning rate of each update of a run on a training set."""
        given = self.lr_schedule
        return LRSchedule(
            self.lengths(samples),
            self.lr,
            parse_shape(given.shape),
            given.warmup or NOTHING,
            given.warmup_lr,
            given.min_lr,
            given.after_warmup,
            given.per_epoch,
        )

    def to_toml(self) -> str:
        """Return the recipe as TOML that `read_recipe` reads: all settings, without those that have no effect.

        So it can be read with another optimizer, which brings its own defaults.
        """
        values = self.model_dump(exclude_none=True, mode="json")
        for key in idle_settings(self):
            section, _, name = key.partition(".")
            values[section].pop(name, None)
        without = {"stream": not self.stream, "track": not self.track.trackers, "task": self.task == TaskSection()}
        values = {name: section for name, section in values.items() if section and not without.get(name)}
        if self.parallel.mesh.endswith(".json"):  # a plan file excludes the other settings of [parallel]
            values["parallel"] = {
                key: values["parallel"][key] for key in ("mesh", "fallback_meshes") if values["parallel"][key]
            }
        return tomli_w.dumps(values)


def _listed(key: str, text: str, config: ModelConfig) -> frozenset[str]:
    try:
        return listed_parameters(text, config)
    except StrategyError as error:
        raise RecipeError(f"{key}: {error}") from None


def first_that_fits(wanted: Sequence[Plan], fit: Callable[[Plan], Plan]) -> Chosen:
    """Return the first plan of `wanted` that `fit` accepts, as `fit` returns it.

    Raises StrategyError: that of `fit` for a single plan, else one with the reasons of all.
    """
    refusals: list[str] = []
    for plan in wanted:
        try:
            fitting = fit(plan)
        except StrategyError as error:
            if len(wanted) == 1:
                raise
            refusals.append(str(error))
        else:
            because = f"the plan is '{shown(fitting)}', since {'; '.join(refusals)}" if refusals else None
            return Chosen(fitting, because)
    reasons = "; ".join(f"{shown(plan)}: {why}" for plan, why in zip(wanted, refusals, strict=True))
    raise StrategyError(f"neither parallel.mesh nor any of parallel.fallback_meshes fits: {reasons}")
