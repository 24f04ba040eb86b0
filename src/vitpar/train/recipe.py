"""Recipes: model, data, optimizer, training and parallel settings, read from TOML and checked before anything starts.

A recipe file names only what differs from the defaults here. Values come, later ones winning, from the file, from
command-line options and from ``--set section.key=value``. The merged recipe is written into the run folder.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import BaseModel, ValidationError, model_validator

from vitpar.errors import RecipeError, nearest
from vitpar.models.config import ViTConfig, model_config
from vitpar.strategy import Plan, parse, read_plan, validate
from vitpar.strategy.support import refuse_clashes, refuse_unused
from vitpar.train.loss_scale import LossScaleSection
from vitpar.train.optimizer_section import Implementation as Implementation
from vitpar.train.optimizer_section import OptimizerSection as OptimizerSection
from vitpar.train.plan_choice import Chosen, first_that_fits
from vitpar.train.recipe_sections import (
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
            raise ValueError(f"both data.path '{self.data.path}' and [stream] are given: keep one")
        for name, value, plain in (
            ("augment.repeats", self.augment.repeats, 1),
            ("augment.mixup", self.augment.mixup, 0),
            ("augment.cutmix", self.augment.cutmix, 0),
            ("data.shuffle_window", self.data.shuffle_window, 0),
        ):
            if value != plain:
                raise ValueError(f"{name} is {value}, which a stream cannot do: leave it out, or index the shards")
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
            refuse_clashes(fitting, precision, self.train.compile)
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
                f"'{mesh}' is a whole plan: leave out the other settings of [parallel], or change the file"
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


# Several ways to say one thing: a later source that gives one of them replaces the other.
_ALTERNATIVES = (
    ("train", "epochs", "steps"),
    ("lr_schedule", "warmup_epochs", "warmup_steps"),
    ("parallel", "microbatches", "microbatch_size"),
    ("checkpoint", "every_steps", "every_epochs", "every_samples", "every_minutes"),
)
_SIZES = ("image_size", "patch_size", "width", "depth", "heads", "hidden")
DEFAULT_RECIPE = Path(__file__).with_name("digits.toml")
"""What runs when neither a recipe nor data is named."""


def read_recipe(
    path: Path | None,
    options: Mapping[str, Any] | None = None,
    assignments: Iterable[str] = (),
    *,
    without: Collection[str] = (),
) -> Recipe:
    """The recipe from the TOML file `path` (None: defaults), then `options` by dotted key, then ``key.sub=value``
    assignments.

    without: sections of the file to leave out. A later model.name, if another than the file's, brings its own sizes;
    a later train.precision drops the file's train.reduce_dtype and [loss_scale]. Options whose value is None are left
    out. Raises RecipeError naming the key, its value and what would be right.
    """
    values = _read_toml(path) if path is not None else {}
    values = {section: settings for section, settings in values.items() if section not in without}
    _check_alternatives({f"{s}.{k}" for s, section in values.items() if isinstance(section, dict) for k in section})
    given = {key: value for key, value in (options or {}).items() if value is not None}
    assigned = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"'{assignment}' sets nothing: write --set section.key=value, as in --set train.seed=1")
        assigned[key.strip()] = _parse_value(text.strip())
    for source in (given, assigned):
        _check_alternatives(source)
    changes = [*given.items(), *assigned.items()]
    # First those that clear what only the file's model or precision uses.
    for key, value in sorted(changes, key=lambda item: item[0] not in ("model.name", "train.precision")):
        section, dot, name = key.partition(".")
        if not dot or not isinstance(values.setdefault(section, {}), dict):
            raise RecipeError(f"'{key}' names no setting: use section.key, as in train.seed")
        for group, *ways in _ALTERNATIVES:
            if section == group and name in ways:
                values[section] = {k: v for k, v in values[section].items() if k not in ways}
        if key == "data.path":
            values.pop("stream", None)
        if section == "stream":
            values.get("data", {}).pop("path", None)
        if key == "model.name" and value != values["model"].get("name"):
            # Another model brings its own sizes; how it is built (pooling, positions, drop-path, …) stays.
            values["model"] = {k: v for k, v in values["model"].items() if k not in _SIZES}
        if key == "train.precision" and value != values["train"].get("precision"):
            values["train"].pop("reduce_dtype", None)
            values.pop("loss_scale", None)
        values[section][name] = value
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(_sentence(error)) from None
    if recipe.train.epochs is None and recipe.train.steps is None:
        raise RecipeError("the recipe says neither train.epochs nor train.steps: give --epochs N or --steps N")
    return recipe


def read_data_section(path: Path) -> DataSection:
    """How the recipe `path` prepares images, whatever else it says. Raises RecipeError."""
    try:
        return DataSection.model_validate(_read_toml(path).get("data", {}))
    except ValidationError as error:
        raise RecipeError(_sentence(error)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise RecipeError(
            f"there is no recipe '{path}': recipes are TOML files such as experiments/digits.toml"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe '{path}' cannot be read: {error}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecipeError(f"the recipe '{path}' is not valid TOML: {error}") from None


def _check_alternatives(keys: Collection[str]) -> None:
    """Refuse several ways to say one thing in one source. keys: dotted, all that the source gives."""
    for group, *ways in _ALTERNATIVES:
        given = [f"{group}.{way}" for way in ways if f"{group}.{way}" in keys]
        if len(given) > 1:
            raise RecipeError(f"both {given[0]} and {given[1]} are given: keep one")
    if "data.path" in keys and (streamed := next((key for key in keys if key.startswith("stream.")), None)):
        raise RecipeError(f"both data.path and {streamed} are given: keep one")


def _parse_value(text: str) -> Any:
    """A TOML value where `text` is one, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _sentence(error: ValidationError) -> str:
    """The first complaint of pydantic as one sentence with the key, the value and the fix."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":  # a sentence of ours
        return str(first["ctx"]["error"])
    if first["type"] == "extra_forbidden":
        return f"unknown recipe key '{key}'{_nearest_key(key)}"
    return f"recipe key '{key}' is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _nearest_key(key: str) -> str:
    keys: dict[str, None] = {}
    for section, field in Recipe.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        keys |= {f"{section}.{name}": None for name in field.annotation.model_fields}
    name = key.partition(".")[2]
    if not name:
        return nearest(key, Recipe.model_fields) or f": sections are {', '.join(Recipe.model_fields)}"
    elsewhere = [known for known in keys if known.endswith(f".{name}")]  # the right name in the wrong section
    return f" (did you mean '{elsewhere[0]}'?)" if elsewhere else nearest(key, keys)
