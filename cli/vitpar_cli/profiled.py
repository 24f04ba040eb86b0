"""Options of commands that predict: profiles or a cluster, a memory budget, and the recipe to plan for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitpar.errors import PlannerError, UserError
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.defaults import TASKS, with_defaults
from vitpar.recipe.request import RecipeRequest
from vitpar.tasks.data import model_of
from vitpar.tasks.image_data import held_bytes
from vitpar.tasks.known import task_class
from vitpar.text import shown
from vitpar.training.prepare import OF_ANOTHER_RUN, with_weights
from vitpar_cli.outputs import local_weights

if TYPE_CHECKING:
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.goodput import Conditions
    from vitpar.planner.training_time import HostInput

HardwareFile = Annotated[
    Path | None,
    typer.Option(
        "--hardware", metavar="FILE", help="Hardware profile of `vitpar profile hardware`.  \\[default: hardware.json]"
    ),
]
ModelFile = Annotated[
    Path | None,
    typer.Option(
        "--model-profile", metavar="FILE", help="Model profile of `vitpar profile model`.  \\[default: model.json]"
    ),
]

PROFILES = Path("runs/profiles")
"""Folder for the profiles that `vitpar train --mesh auto` measures."""

ClusterName = Annotated[
    str | None,
    typer.Option("--cluster", metavar="NAME", help="8xH100, 4x8xA100-40GB or a TOML file, instead of --hardware."),
]
NumClasses = Annotated[
    int | None, typer.Option("--num-classes", min=1, help="Classes, with --cluster.  \\[default: the data's, or 1000]")
]
ReportFile = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write an HTML page with charts.")]


def _condition(flag: str, metavar: str, least: float, most: float, text: str) -> Any:
    """Return an option about the cluster, for use in ``Annotated``."""
    return typer.Option(flag, metavar=metavar, min=least, max=most, help=text, rich_help_panel="Failures and money")


_FAILURES = "Mean hours between failures of one device, such as 50000: predict checkpoints and useful time."
_PRICE = "Price of an hour of one device, in any currency: predict the cost of the training."
_STALL = "Seconds that training waits for a checkpoint, for --mtbf; a run's log.txt has them.  \\[default: 1]"
_RESTART = "Seconds from a failure to the first step after it, for --mtbf.  \\[default: 120]"
Mtbf = Annotated[float | None, _condition("--mtbf", "HOURS", 1e-3, 1e12, _FAILURES)]
HourPrice = Annotated[float | None, _condition("--price", "AMOUNT", 0, 1e12, _PRICE)]
Stall = Annotated[float | None, _condition("--stall", "SECONDS", 1e-6, 1e6, _STALL)]
Restart = Annotated[float | None, _condition("--restart", "SECONDS", 0, 1e6, _RESTART)]
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


def conditions(
    mtbf: float | None, price: float | None, stall: float | None, restart: float | None
) -> Conditions | None:
    """Return the conditions of a cluster that options describe; None if they say nothing.

    Raises PlannerError for options that do nothing without --mtbf.
    """
    from vitpar.planner.goodput import RESTART, STALL, Conditions

    for option, value in (("--stall", stall), ("--restart", restart)):
        if value is not None and mtbf is None:
            raise PlannerError(f"{option} is given without failures: add --mtbf HOURS, or leave it out")
    if mtbf is None and price is None:
        return None
    return Conditions(mtbf, price, STALL if stall is None else stall, RESTART if restart is None else restart)


def host_input(rate: float | None, cluster: str | None, ranks: int) -> HostInput | None:
    """Return the input of the machines; None if it is unknown.

    rate: images that a machine prepares in a second; None for those of the cluster. ranks: of the profiled machine.
    """
    from vitpar.planner.profile.cluster import find_cluster
    from vitpar.planner.training_time import HostInput

    if cluster is None:
        return None if rate is None else HostInput(rate, ranks)
    found = find_cluster(cluster)
    rate = rate or (found.host.images_per_second if found.host else None)
    return None if rate is None else HostInput(rate, found.devices_per_node)


MemorySize = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="Memory limit per rank, such as 24GB.  \\[default: 90 % of a device]"
    ),
]


def refuse_mixed(cluster: str | None, hardware: Path | None, model: Path | None, num_classes: int | None) -> None:
    """Raise PlannerError if options contradict each other or a profile is missing."""
    if cluster and (hardware or model):
        raise PlannerError("both --cluster and a profile are given: give one of the two")
    if num_classes is not None and not cluster:
        raise PlannerError("--num-classes is given without --cluster: leave it out, the profiled model has its own")
    if not cluster:
        from vitpar.planner.profile.profiles import HARDWARE, MODEL, Hardware, ModelProfile

        measured = any(PROFILES.glob("*.json"))
        for kind, given, usual in ((Hardware, hardware, HARDWARE), (ModelProfile, model, MODEL)):
            path = given or usual
            if not path.exists() and (given or not measured):
                kind.read(path)  # raises; otherwise it is read later, when torch was imported


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


def numbers(text: str, option: str, most: int) -> tuple[int, ...]:
    """Return the positive integers in a list such as `256,512`.

    option: name of the option, for messages.
    most: largest accepted number.

    Raises PlannerError.
    """
    parts = [part.strip() for part in text.split(",")]
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


def costs_of(
    recipe: Recipe,
    cluster: str | None,
    hardware: Path | None,
    model: Path | None,
    num_classes: int | None,
    ranks: int | None = None,
) -> LayerCosts:
    """Return the costs of the recipe's model on a cluster or on the profiled machine.

    cluster: name of the cluster; None for profiles.
    num_classes: classes of the model on a cluster; None for those of the recipe's data, or 1000.
    ranks: number of devices of the cluster to use; None for all.

    Raises PlannerError and RecipeError.
    """
    from vitpar.planner.profile.profiles import HARDWARE, MODEL, Hardware
    from vitpar.planner.sources import estimated_costs, planned_teacher, profiled_costs

    train = recipe.train
    if cluster:
        config = model_of(recipe, num_classes, 1000)
        of_recipe = train.precision, train.compile, ranks, recipe.frozen(config), train.fp8_min_features
        costs = estimated_costs(config, cluster, *of_recipe, planned_teacher(recipe, config))
    else:
        # Classes change no costs, but the sizes of text do.
        text = task_class(recipe).INPUT == "text"
        machine = hardware or found(HARDWARE, Hardware.read)

        def of_profile(path: Path) -> LayerCosts:
            return profiled_costs(
                lambda classes: model_of(recipe, None, classes) if text else recipe.config(classes),
                train.precision,
                train.compile,
                machine,
                path,
                recipe.frozen,
                train.fp8_min_features,
                lambda config: planned_teacher(recipe, config),
            )

        costs = of_profile(model or found(MODEL, of_profile))
    recipe.with_precision(costs.model.precision)  # refuses settings without effect in that precision
    return with_held(costs, recipe)


def with_held(costs: LayerCosts, recipe: Recipe) -> LayerCosts:
    """Return the costs, with the memory reserved that images of the recipe take on each GPU.

    Raises DataError for data that cannot be read.
    """
    if costs.hardware.device == "cuda":
        costs.reserve(held_bytes(recipe, costs.whole))
    return costs
