"""Layer costs of a model, from measured profiles or from a cluster's data sheet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitpar.errors import ModelError, PlannerError
from vitpar.models.config import ModelConfig
from vitpar.models.families import config_from_json, config_to_json
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.records import PlannedTeacher
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.profile.profiles import HARDWARE, MODEL, Hardware, ModelProfile
from vitpar.planner.search.space import FLAGS
from vitpar.recipe import Recipe
from vitpar.recipe.machine import automatic_precision
from vitpar.strategy.execution import FP8_MIN_FEATURES
from vitpar.tasks import task_of
from vitpar.tasks.known import task_class

NO_COSTS = ("name", "norm_eps", "init")
"""Model settings that do not affect costs: a profile with other values of them applies too."""
USED = 0.9
"""Default share of a device's memory that plans may use; the rest is for other programs and fragmentation."""


def planned_teacher(recipe: Recipe, config: ModelConfig) -> PlannedTeacher | None:
    """Return the teacher of a recipe for the model `config`; None if it has none.

    Raises DataError, RecipeError and StrategyError for a teacher that does not fit.
    """
    if task_class(recipe).AVERAGES:
        task = task_of(recipe, config.num_classes)
        average = task.teacher_config(config)
        assert average is not None, "the average is its teacher"
        return PlannedTeacher(average, None, task.sample_group)
    if recipe.distill.teacher is None:
        return None
    from vitpar.training.teacher import open_teacher

    return PlannedTeacher(open_teacher(recipe, config)[1], recipe.distill)


def profiled_costs(
    recipe: Recipe,
    model: Callable[[int], ModelConfig],
    hardware_file: Path | None = None,
    model_file: Path | None = None,
) -> LayerCosts:
    """Return the costs of a recipe's model on the machine that was profiled.

    Automatic precision and compilation are what a training on such devices would choose.

    model: function of a number of classes that returns the model's shape; called with that of the profile
    hardware_file, model_file: profiles; None for hardware.json and model.json

    Raises PlannerError if profiles and model differ in shape, precision, compilation or kind of device.
    """
    train = recipe.train
    precision: str = train.precision
    compiled, fp8_min_features = train.compile, train.fp8_min_features
    hardware = Hardware.read(hardware_file or HARDWARE)
    path = model_file or MODEL
    profile = ModelProfile.read(path)
    try:
        config = config_from_json(profile.model)
    except ModelError as error:
        raise PlannerError(f"{path} does not describe a valid model: {error}: profile the model again") from None
    wanted = config_to_json(model(config.num_classes))
    for field, value in config_to_json(config).items():
        if field not in NO_COSTS and value != wanted.get(field):
            raise PlannerError(
                f"{path} was profiled with model {field} {value} but the recipe has {wanted.get(field)}: profile the "
                "recipe's model with `vitpar profile model --recipe`, or use the profiled recipe"
            )
    if precision == "auto":
        precision = automatic_precision(profile.precision, profile.device)
    if compiled is None:
        compiled = profile.compiled and profile.device == "cuda"
    for name, measured, asked in (
        ("precision", profile.precision, precision),
        ("compile", profile.compiled, compiled),
        ("fp8_min_features", profile.fp8_min_features, fp8_min_features if precision == "fp8" else None),
    ):
        if asked is not None and measured != asked:
            raise PlannerError(
                f"{path} was measured with {name} {measured} but the recipe has {asked}: profile the model again, "
                f"or set train.{name}"
            )
    if profile.device != hardware.device:
        raise PlannerError(
            f"the model was profiled on {profile.device} but the hardware on {hardware.device}: "
            "profile both on the same machine"
        )
    return LayerCosts(config, hardware, profile, recipe.frozen(config), planned_teacher(recipe, config))


def estimated_costs(
    config: ModelConfig,
    cluster: str,
    precision: str = "auto",
    compiled: bool | None = None,
    ranks: int | None = None,
    frozen: frozenset[str] = frozenset(),
    fp8_min_features: int = FP8_MIN_FEATURES,
    teacher: PlannedTeacher | None = None,
) -> LayerCosts:
    """Return the costs of a model on devices of a cluster, estimated from its data sheet.

    cluster: name such as 8xH100 or 4x8xA100-40GB, or path of a TOML file
    precision: name of the precision; "auto" for bf16 if the devices support it
    compiled: whether blocks are compiled; None for true, as in a training on GPUs
    ranks: number of devices; None for all
    frozen: names of the parameters that are not trained
    fp8_min_features: smallest linear layers that multiply in float8, as in ``Execution``
    teacher: teacher of the model; None for none

    Raises PlannerError for an unknown cluster or precision.
    """
    hardware, assumed = find_cluster(cluster).hardware(ranks), precision == "auto"
    if assumed:
        native = "bf16" if any(rate.dtype == "bfloat16" for rate in hardware.matmuls) else None
        precision = automatic_precision(native, hardware.device)
    profile = estimate_model(
        config,
        precision,
        hardware,
        tensors(config, hardware.ranks),
        compiled=compiled is not False,
        fp8_min_features=fp8_min_features,
    )
    if assumed:
        profile = profile.model_copy(update={"measured": profile.measured | {"assumed": f"precision {precision}"}})
    return LayerCosts(config, hardware, profile, frozen, teacher)


def recipe_costs(
    recipe: Recipe, config: ModelConfig, cluster: str, ranks: int | None = None, compiled: bool | None = None
) -> LayerCosts:
    """Return the costs of a recipe's model `config` as `estimated_costs` does.

    compiled: whether blocks are compiled; None for the recipe's setting
    """
    train = recipe.train
    return estimated_costs(
        *(config, cluster, train.precision, train.compile if compiled is None else compiled, ranks),
        *(recipe.frozen(config), train.fp8_min_features, planned_teacher(recipe, config)),
    )


def usual_budget(costs: LayerCosts) -> float:
    """Return the default memory limit of a rank, in bytes."""
    return USED * costs.hardware.memory_bytes


def known_flags(costs: LayerCosts) -> tuple[str, ...]:
    """Return the flags of strategies whose costs are in the profiles."""
    lacking = {"ckpt", "ckpt.selective"} - costs.model.flags | ({"offload"} if costs.hardware.host is None else set())
    return tuple(flag for flag in FLAGS if flag not in lacking)


def unprofiled(costs: LayerCosts, ranks: int) -> set[str]:
    """Return the flags and tensor-parallel parts that model and machine allow, but whose costs are not profiled."""
    useless = {"offload"} if costs.hardware.device == "cpu" else set()
    return {*FLAGS} - {*known_flags(costs)} - useless | {*tensors(costs.whole, ranks)} - {*costs.model.tensors}
