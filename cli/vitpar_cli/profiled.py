"""Options of commands that predict: profiles or a cluster, a memory limit, and the recipe to plan for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitpar.errors import PlannerError, UserError
from vitpar.models import ModelConfig
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.defaults import TASKS, with_defaults
from vitpar.recipe.request import RecipeRequest
from vitpar.sizes import parse_size
from vitpar.tasks.data import model_of
from vitpar.tasks.image_data import held_bytes
from vitpar.tasks.known import task_class
from vitpar.text import shown
from vitpar.training.prepare import OF_ANOTHER_RUN, with_weights
from vitpar_cli.outputs import local_weights
from vitpar_cli.recipe_options import Group

if TYPE_CHECKING:
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.goodput import Conditions
    from vitpar.planner.training_time import TrainingLength

PROFILES = Path("runs/profiles")
"""Folder for the profiles that `vitpar train --mesh auto` measures."""


def option(kind: Any, flag: str, metavar: str | None, text: str, **more: Any) -> Any:
    """Return the annotation of an option. text: its help. more: as for `typer.Option`."""
    return Annotated[kind | None, typer.Option(flag, metavar=metavar, help=text, **more)]


def _condition(flag: str, metavar: str, least: float, most: float, text: str) -> Any:
    """Return the annotation of an option about failures or money."""
    return option(float, flag, metavar, text, min=least, max=most, rich_help_panel="Failures and money")


ReportFile = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write an HTML page with charts.")]
InputRate = Annotated[
    float | None,
    typer.Option(
        "--images-per-second",
        metavar="RATE",
        min=1e-3,
        max=1e12,
        help="Images that a machine decodes and augments in a second, as `vitpar train --dry-run` says: count waiting.",
    ),
]
_PROFILE = "profile of `vitpar profile"
_STALL = "Seconds that training waits for a checkpoint, for --mtbf; a run's log.txt has them.  \\[default: 1]"
OPTIONS: dict[str, Any] = {
    "hardware": option(Path, "--hardware", "FILE", f"Hardware {_PROFILE} hardware`.  \\[default: hardware.json]"),
    "model_profile": option(Path, "--model-profile", "FILE", f"Model {_PROFILE} model`.  \\[default: model.json]"),
    "cluster": option(
        str,
        "--cluster",
        "NAME",
        "8xH100, 4x8xA100-40GB or a TOML file, instead of --hardware.",
    ),
    "num_classes": option(
        int, "--num-classes", None, "Classes, with --cluster.  \\[default: the data's, or 1000]", min=1
    ),
    "memory": option(str, "--memory", "SIZE", "Memory limit per rank, such as 24GB.  \\[default: 90 % of a device]"),
    "mtbf": _condition(
        *("--mtbf", "HOURS", 1e-3, 1e12),
        "Mean hours between failures of one device, such as 50000: predict checkpoints and useful time.",
    ),
    "hour_price": _condition(
        *("--price", "AMOUNT", 0, 1e12),
        "Price of an hour of one device, in any currency: predict the cost of the training.",
    ),
    "stall": _condition("--stall", "SECONDS", 1e-6, 1e6, _STALL),
    "restart": _condition(
        *("--restart", "SECONDS", 0, 1e6),
        "Seconds from a failure to the first step after it, for --mtbf.  \\[default: 120]",
    ),
    "images_per_second": InputRate,
}
"""Annotation of each option of `Machine`, by field."""


@dataclass(frozen=True)
class Machine:
    """Machine that a prediction is for, and its limits; None for what options leave open."""

    hardware: Path | None = None
    """Hardware profile; found if None."""
    model_profile: Path | None = None
    """Model profile; found if None."""
    cluster: str | None = None
    """Cluster, instead of profiles."""
    num_classes: int | None = None
    """Classes of the model on a cluster; None for those of the recipe's data, or 1000."""
    memory: str | None = None
    """Memory limit of a rank, such as 24GB."""
    mtbf: float | None = None
    """Mean hours between failures of a device."""
    hour_price: float | None = None
    """Price of an hour of a device."""
    stall: float | None = None
    """Seconds that training waits for a checkpoint."""
    restart: float | None = None
    """Seconds from a failure to the first step after it."""
    images_per_second: float | None = None
    """Images that a machine prepares in a second; None for those of the cluster."""

    def __post_init__(self) -> None:
        for name, value in (("--stall", self.stall), ("--restart", self.restart)):
            if value is not None and self.mtbf is None:
                raise PlannerError(f"{name} is given without failures: add --mtbf HOURS, or leave it out")
        if self.cluster and (self.hardware or self.model_profile):
            raise PlannerError("both --cluster and a profile are given: give one of the two")
        if self.memory is not None:
            parse_size(self.memory)

    @property
    def named(self) -> bool:
        """Whether options name a cluster or a profile."""
        return any((self.cluster, self.hardware, self.model_profile))

    @property
    def conditions(self) -> Conditions | None:
        """Failures and price of the cluster; None if neither is known."""
        from vitpar.planner.goodput import RESTART, STALL, Conditions

        if self.mtbf is None and self.hour_price is None:
            return None
        stall = STALL if self.stall is None else self.stall
        return Conditions(self.mtbf, self.hour_price, stall, RESTART if self.restart is None else self.restart)

    def refuse_missing(self) -> None:
        """Raise PlannerError if a profile is missing, or has classes of its own."""
        if self.num_classes is not None and not self.cluster:
            raise PlannerError("--num-classes is given without --cluster: leave it out, the profiled model has its own")
        if not self.cluster:
            from vitpar.planner.profile.profiles import HARDWARE, MODEL, Hardware, ModelProfile

            measured = any(PROFILES.glob("*.json"))
            for kind, given, usual in ((Hardware, self.hardware, HARDWARE), (ModelProfile, self.model_profile, MODEL)):
                path = given or usual
                if not path.exists() and (given or not measured):
                    kind.read(path)  # raises; otherwise it is read later, when torch was imported

    def costs(self, recipe: Recipe, ranks: int | None = None) -> LayerCosts:
        """Return the costs of the recipe's model on the cluster or on the profiled machine.

        ranks: number of devices of the cluster to use; None for all.

        Raises PlannerError and RecipeError.
        """
        from vitpar.planner.profile.profiles import HARDWARE, MODEL, Hardware

        if self.cluster:
            costs = estimated(recipe, model_of(recipe, self.num_classes, 1000), self.cluster, ranks)
        else:
            # Classes change no costs, but the sizes of text do.
            text = task_class(recipe).INPUT == "text"
            machine = self.hardware or found(HARDWARE, Hardware.read)

            def model(classes: int) -> ModelConfig:
                return model_of(recipe, None, classes) if text else recipe.config(classes)

            def of_profile(path: Path) -> LayerCosts:
                return measured(recipe, model, machine, path)

            costs = of_profile(self.model_profile or found(MODEL, of_profile))
        recipe.with_precision(costs.model.precision)  # refuses settings without effect in that precision
        return with_held(costs, recipe)

    def budget(self, costs: LayerCosts) -> float:
        """Return the memory limit of a rank, in bytes."""
        from vitpar.planner.sources import usual_budget

        return usual_budget(costs) if self.memory is None else parse_size(self.memory)

    def length(self, recipe: Recipe, ranks: int) -> TrainingLength:
        """Return the length of the recipe's training. ranks: of the profiled machine."""
        from vitpar.planner.profile.cluster import find_cluster
        from vitpar.planner.training_time import HostInput, training_length

        rate = self.images_per_second
        if self.cluster is not None:
            cluster = find_cluster(self.cluster)
            rate, ranks = rate or (cluster.host.images_per_second if cluster.host else None), cluster.devices_per_node
        return training_length(recipe, self.conditions, None if rate is None else HostInput(rate, ranks))


def machine_options(*names: str, **helps: str) -> Group:
    """Return the group of options that makes a `Machine`.

    names: its fields; all if there are none.
    helps: other helps, by field.
    """
    return Group({name: OPTIONS[name] for name in names or OPTIONS}, Machine).helped(**helps)


def matches(fits: Callable[[Path], object], path: Path) -> bool:
    """Return whether a profile exists and `fits` returns a true value for it; an unreadable one does not."""
    try:
        return path.exists() and bool(fits(path))
    except UserError:
        return False


def found(usual: Path, fits: Callable[[Path], object]) -> Path:
    """Return the first of `usual` and of the profiles in PROFILES, newest first, that `fits`; else `usual`."""
    kept = sorted(PROFILES.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in (usual, *kept) if matches(fits, path)), usual)


def numbers(text: str | None, option: str, most: int) -> tuple[int, ...]:
    """Return the positive integers in a list such as `256,512`; none if the option is left out.

    option: name of the option, for messages.
    most: largest accepted number.

    Raises PlannerError.
    """
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,18}", part) for part in parts):
        raise PlannerError(f"{option} {shown(text)} is not a number: use 256, or several as in 256,512,1024")
    values = tuple(map(int, parts))
    if wrong := [number for number in values if not 1 <= number <= most]:
        raise PlannerError(f"{option} is {wrong[0]}: use 1 to {most:,}")
    return values


def planned_recipe(request: RecipeRequest, *, doing: str = "a search") -> Recipe:
    """Return the recipe to plan for, which needs no data.

    If a model is named without a recipe, it is the published model, without a length unless the request has one; a task
    without a model and data has its default model. If data or weights are named without a recipe, it is the recipe that
    `vitpar train` would use.

    doing: kind of command, as for `RecipeRequest.refuse_idle`.

    Raises RecipeError, also for a setting in `assignments` that has no effect on the command, and DataError.
    """
    request.refuse_idle(doing)
    came = False
    if request.value("model.weights"):
        request, came = with_weights(request, local_weights)
    named = request.value("model.name") or request.value("task.name")
    if request.path is None and named and not request.names_data:
        given = {**request.given, "data.path": "unused"}
        recipe = read_recipe(None, given, request.assignments, needs_length=False)
        task = recipe.task.name
        return with_defaults(recipe, TASKS[task].samples) if task in TASKS else recipe
    return request.read_with_defaults(OF_ANOTHER_RUN if came else ()).recipe


def estimated(
    recipe: Recipe, config: ModelConfig, cluster: str, ranks: int | None, compiled: bool | None = None
) -> LayerCosts:
    """Return the costs of a recipe's model, estimated from the data sheet of a cluster.

    compiled: whether blocks are compiled; None for the recipe's setting.
    """
    from vitpar.planner.sources import estimated_costs, planned_teacher

    train = recipe.train
    compiled = train.compile if compiled is None else compiled
    of_recipe = train.precision, compiled, ranks, recipe.frozen(config), train.fp8_min_features
    return estimated_costs(config, cluster, *of_recipe, planned_teacher(recipe, config))


def measured(recipe: Recipe, model: Callable[[int], ModelConfig], hardware: Path, profile: Path) -> LayerCosts:
    """Return the costs of a recipe's model from profiles. model: function of a number of classes."""
    from vitpar.planner.sources import planned_teacher, profiled_costs

    train = recipe.train
    return profiled_costs(
        *(model, train.precision, train.compile, hardware, profile, recipe.frozen, train.fp8_min_features),
        teacher=lambda config: planned_teacher(recipe, config),
    )


def with_held(costs: LayerCosts, recipe: Recipe) -> LayerCosts:
    """Return the costs, with the memory reserved that images of the recipe take on each GPU.

    Raises DataError for data that cannot be read.
    """
    if costs.hardware.device == "cuda":
        costs.reserve(held_bytes(recipe, costs.whole))
    return costs
