"""What prices are made of: profiles beside the recipe they have to fit, or a cluster's data sheet; and budgets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitpar.errors import ModelError, PlannerError
from vitpar.limits import MAX_AMOUNT
from vitpar.text import shown
from vitpar_cli import recipe_options as o

if TYPE_CHECKING:
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.training.recipe import Recipe

HardwareFile = Annotated[
    Path | None,
    typer.Option(
        "--hardware", metavar="FILE", help="What `vitpar profile hardware` wrote.  \\[default: hardware.json]"
    ),
]
ModelFile = Annotated[
    Path | None,
    typer.Option("--model-profile", metavar="FILE", help="What `vitpar profile model` wrote.  \\[default: model.json]"),
]

ClusterName = Annotated[
    str | None,
    typer.Option("--cluster", metavar="NAME", help="8xH100, 4x8xA100-40GB or a TOML file, instead of --hardware."),
]
NumClasses = Annotated[
    int | None, typer.Option("--num-classes", min=1, help="Classes, with --cluster.  \\[default: 1000]")
]
ReportFile = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write a page with charts, for a browser.")
]
MemorySize = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Most a rank may take, as in 24GB.  \\[default: 90 % of a device]"),
]
_NO_COSTS = ("name", "norm_eps", "init")
"""Model settings that do not affect costs, so a profile with other values still applies."""
UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
FREE = 0.9  # of a device's memory, when no budget is given: the rest is for other programs and fragments


def refuse_mixed(cluster: str | None, hardware: Path | None, model: Path | None, num_classes: int | None) -> None:
    """Raise PlannerError where a cluster is named beside profiles, or what only goes with one without it."""
    if cluster and (hardware or model):
        raise PlannerError("--cluster is given beside a profile: give one of the two")
    if num_classes is not None and not cluster:
        raise PlannerError("--num-classes is given without --cluster: leave it out, the profiled model has its own")


def parse_size(text: str, option: str = "--memory") -> float:
    """Bytes of `24GB`, `1.5GiB`, `500MB`. Raises PlannerError."""
    match = re.fullmatch(r"([0-9]{0,15}\.?[0-9]{1,15})\s*([A-Za-z]{1,3})", text.strip())
    if not match or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise PlannerError(f"{option} {shown(text)} is no size: use a number and a unit, as in 24GB, 1.5GiB or 500MB")
    size = float(match[1]) * UNITS[match[2].upper()]
    if size > MAX_AMOUNT:
        raise PlannerError(f"{option} {text} is more than anything has: use at most {MAX_AMOUNT:,}B")
    return size


def numbers(text: str, option: str, most: int) -> tuple[int, ...]:
    """Return the whole numbers in a list such as `256,512`. most: the largest accepted. Raises PlannerError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,18}", part) for part in parts):
        raise PlannerError(f"{option} {shown(text)} is no number: use 256, or several as in 256,512,1024")
    found = tuple(map(int, parts))
    if wrong := [number for number in found if not 1 <= number <= most]:
        raise PlannerError(f"{option} has {wrong[0]}: use 1 to {most:,}")
    return found


def planned_recipe(recipe: Path | None, given: Mapping[str, object], assignments: list[str] | None) -> Recipe:
    """The recipe that is planned for, without data; a model that is named beside no recipe is the published one.
    given: settings by dotted key. Raises RecipeError for settings that change nothing."""
    o.refuse_idle(assignments, "a search")
    named = recipe is None and given.get("model.name")
    return o.merged_recipe(recipe, {**given, **o.NO_DATA} if named else given, assignments)


def costs_of(
    recipe: Recipe,
    cluster: str | None,
    hardware: Path | None,
    model: Path | None,
    num_classes: int | None,
    ranks: int | None = None,
) -> LayerCosts:
    """Of `ranks` devices of a cluster (all, if None), or of the machine and model that profiles have."""
    if cluster:
        return estimated_costs(cluster, ranks, recipe, num_classes or 1000)
    return profiled_costs(hardware, model, recipe)


def usual_budget(costs: LayerCosts) -> float:
    """Bytes of a rank, where none are named."""
    return FREE * costs.hardware.memory_bytes


def profiled_costs(hardware_file: Path | None, model_file: Path | None, recipe: Recipe) -> LayerCosts:
    """The costs of the recipe's model on the profiled machine. Raises PlannerError where profiles and recipe are not of
    the same model, precision and kind of device."""
    from vitpar.models.config import config_from_json
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.profile.profiles import Hardware, ModelProfile
    from vitpar.training.recipe.machine import planned_precision

    hardware = Hardware.read(hardware_file or Path("hardware.json"))
    path = model_file or Path("model.json")
    profile = ModelProfile.read(path)
    try:
        config = config_from_json(profile.model)
    except ModelError as error:
        raise PlannerError(f"{path} is of no model: {error}: profile the model again") from None
    wanted = asdict(recipe.config(config.num_classes))
    for field, value in asdict(config).items():
        if field not in _NO_COSTS and value != wanted[field]:
            raise PlannerError(
                f"{path} is of a model with {field} {value} but the recipe's has {wanted[field]}: profile the recipe's "
                "model by vitpar profile model --recipe, or name the recipe that was profiled"
            )
    recipe = planned_precision(recipe, profile.precision, profile.device)
    compiled = recipe.train.compile
    if compiled is None:  # on GPUs as it came out when they were profiled
        compiled = profile.compiled and profile.device == "cuda"
    trained = {"precision": recipe.train.precision, "compile": compiled}
    for name, value in (("precision", profile.precision), ("compile", profile.compiled)):
        if value != trained[name]:
            raise PlannerError(
                f"{path} was measured with {name} {value} but the recipe has {trained[name]}: profile the model again, "
                f"or set train.{name}"
            )
    if profile.device != hardware.device:
        raise PlannerError(
            f"the model was profiled on {profile.device} but the hardware on {hardware.device}: "
            "profile both on the same machine"
        )
    return LayerCosts(config, hardware, profile)


def estimated_costs(cluster: str, ranks: int | None, recipe: Recipe, num_classes: int) -> LayerCosts:
    """The costs of the recipe's model on `ranks` devices of a cluster (all, if None), by arithmetic.

    Blocks are compiled unless the recipe says no, as a run on GPUs compiles them.
    """
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.profile.cluster import find_cluster
    from vitpar.planner.profile.estimate import estimate_model, tensors
    from vitpar.training.recipe.machine import planned_precision

    hardware, config = find_cluster(cluster).hardware(ranks), recipe.config(num_classes)
    native = "bf16" if any(rate.dtype == "bfloat16" for rate in hardware.matmuls) else None
    precision = planned_precision(recipe, native, hardware.device).train.precision
    compiled = recipe.train.compile is not False
    profile = estimate_model(config, precision, hardware, tensors(config, hardware.ranks), compiled=compiled)
    if recipe.train.precision == "auto":
        profile = profile.model_copy(update={"measured": profile.measured | {"assumed": f"precision {precision}"}})
    return LayerCosts(config, hardware, profile)


def known_flags(costs: LayerCosts) -> tuple[str, ...]:
    """Flags of strategies that the profiles know the costs of."""
    from vitpar.planner.search.space import FLAGS

    lacking = {"ckpt", "ckpt.selective"} - costs.model.flags | ({"offload"} if costs.hardware.host is None else set())
    return tuple(flag for flag in FLAGS if flag not in lacking)


def unknown(costs: LayerCosts, ranks: int) -> set[str]:
    """Flags and tensor-parallel parts that model and machine allow, but the profiles do not know."""
    from vitpar.planner.profile.estimate import tensors
    from vitpar.planner.search.space import FLAGS

    useless = {"offload"} if costs.hardware.device == "cpu" else set()
    return {*FLAGS} - {*known_flags(costs)} - useless | {*tensors(costs.config, ranks)} - {*costs.model.tensors}
