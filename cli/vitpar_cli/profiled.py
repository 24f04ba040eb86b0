"""Options of commands that predict: profiles or a cluster, a memory limit, and the recipe to plan for."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from vitpar.errors import PlannerError, UserError
from vitpar.models import ModelConfig
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.goodput import RESTART, STALL, Conditions
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.profiles import HARDWARE, MODEL, Hardware
from vitpar.planner.sources import profiled_costs, recipe_costs, usual_budget
from vitpar.planner.training_time import TrainingLength, training_length
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.defaults import TASKS, with_defaults
from vitpar.recipe.request import RecipeRequest
from vitpar.sizes import parse_size
from vitpar.tasks.data import held_bytes, model_of
from vitpar.tasks.known import task_class
from vitpar.text import shown
from vitpar.training.prepare import OF_ANOTHER_RUN, with_weights
from vitpar_cli.outputs import local_weights
from vitpar_cli.recipe_options import Group

PROFILES = Path("runs/profiles")
"""Folder for the profiles that `vitpar train --mesh auto` measures."""


def _option(flag: str, metavar: str, text: str, **settings: Any) -> Any:
    """Return an option. text: its help. settings: others of `typer.Option`."""
    return typer.Option(flag, metavar=metavar, help=text, **settings)


_condition = partial(_option, rich_help_panel="Failures and money")
"""Return an option about failures or money."""
_RATE = "Images that a machine decodes and augments in a second, as `vitpar train --dry-run` says: count waiting."
_FAILURES = "Mean hours between failures of one device, such as 50000: predict checkpoints and useful time."
_PRICE = "Price of an hour of one device, in any currency: predict the cost of the training."
_STALL = "Seconds that training waits for a checkpoint, for --mtbf; a run's log.txt has them.  \\[default: 1]"
_RESTART = "Seconds from a failure to the first step after it, for --mtbf.  \\[default: 120]"
_CLUSTER = "8xH100, 4x8xA100-40GB or a TOML file, instead of --hardware."
_CLASSES = "Classes, with --cluster.  \\[default: the data's, or 1000]"
_MEMORY = "Memory limit per rank, such as 24GB.  \\[default: 90 % of a device]"
_HARDWARE = "Hardware profile of `vitpar profile hardware`.  \\[default: hardware.json]"
_MODEL = "Model profile of `vitpar profile model`.  \\[default: model.json]"
ReportFile = Annotated[Path | None, _option("--report", "FILE", "Write an HTML page with charts.")]
InputRate = Annotated[float | None, _option("--images-per-second", "RATE", _RATE, min=1e-3, max=1e12)]


@dataclass(frozen=True)
class MachineOptions:
    """Machine that a prediction is for, its limits, failures and price, as options say; None for what is left out.

    The options in the annotations describe the fields. A profile that is left out is found.
    """

    hardware: Annotated[Path | None, _option("--hardware", "FILE", _HARDWARE)] = None
    model_profile: Annotated[Path | None, _option("--model-profile", "FILE", _MODEL)] = None
    cluster: Annotated[str | None, _option("--cluster", "NAME", _CLUSTER)] = None
    num_classes: Annotated[int | None, typer.Option("--num-classes", min=1, help=_CLASSES)] = None
    memory: Annotated[str | None, _option("--memory", "SIZE", _MEMORY)] = None
    mtbf: Annotated[float | None, _condition("--mtbf", "HOURS", _FAILURES, min=1e-3, max=1e12)] = None
    hour_price: Annotated[float | None, _condition("--price", "AMOUNT", _PRICE, min=0, max=1e12)] = None
    stall: Annotated[float | None, _condition("--stall", "SECONDS", _STALL, min=1e-6, max=1e6)] = None
    restart: Annotated[float | None, _condition("--restart", "SECONDS", _RESTART, min=0, max=1e6)] = None
    images_per_second: InputRate = None

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
        if self.mtbf is None and self.hour_price is None:
            return None
        stall = STALL if self.stall is None else self.stall
        return Conditions(self.mtbf, self.hour_price, stall, RESTART if self.restart is None else self.restart)

    def costs(self, recipe: Recipe, ranks: int | None = None) -> LayerCosts:
        """Return the costs of the recipe's model on the cluster or on the profiled machine.

        ranks: number of devices of the cluster to use; None for all.

        Raises PlannerError and RecipeError.
        """
        if self.num_classes is not None and not self.cluster:
            raise PlannerError("--num-classes is given without --cluster: leave it out, the profiled model has its own")
        if self.cluster:
            costs = recipe_costs(recipe, model_of(recipe, self.num_classes, 1000), self.cluster, ranks)
        else:
            # Classes change no costs, but the sizes of text do.
            text = task_class(recipe).INPUT == "text"
            kept = sorted(PROFILES.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
            machine = self.hardware or found(Hardware.read, HARDWARE, *kept) or HARDWARE

            def model(classes: int) -> ModelConfig:
                return model_of(recipe, None, classes) if text else recipe.config(classes)

            def of_profile(path: Path) -> LayerCosts:
                return profiled_costs(recipe, model, machine, path)

            costs = of_profile(self.model_profile or found(of_profile, MODEL, *kept) or MODEL)
        recipe.with_precision(costs.model.precision)  # refuses settings without effect in that precision
        return with_held(costs, recipe)

    def budget(self, costs: LayerCosts) -> float:
        """Return the memory limit of a rank, in bytes."""
        return usual_budget(costs) if self.memory is None else parse_size(self.memory)

    def length(self, recipe: Recipe, ranks: int) -> TrainingLength:
        """Return the length of the recipe's training. ranks: of the profiled machine."""
        rate = self.images_per_second
        if self.cluster is not None:
            cluster = find_cluster(self.cluster)
            rate, ranks = rate or (cluster.host.images_per_second if cluster.host else None), cluster.devices_per_node
        return training_length(recipe, self.conditions, None if rate is None else (rate, ranks))


def machine_options(*names: str, **helps: str) -> Group:
    """Return the group of options that makes a `MachineOptions`.

    names: its fields; all if there are none.
    helps: other helps, by field.
    """
    options = get_type_hints(MachineOptions, include_extras=True)
    return Group({name: options[name] for name in names or options}, MachineOptions).helped(**helps)


def found(fits: Callable[[Path], object], *paths: Path) -> Path | None:
    """Return the first of the profiles that exists and for which `fits` returns a true value; None if none does.

    A profile for which it raises UserError, such as an unreadable one, does not fit.
    """
    for path in paths:
        with suppress(UserError):
            if path.exists() and fits(path):
                return path
    return None


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
    if request.given.get("model.weights"):
        request, came = with_weights(request, local_weights)
    named = request.given.get("model.name") or request.given.get("task.name")
    if request.path is None and named and not request.names_data:
        given = {**request.given, "data.path": "unused"}
        recipe = read_recipe(None, given, request.assignments, needs_length=False)
        task = recipe.task.name
        return with_defaults(recipe, TASKS[task].samples) if task in TASKS else recipe
    return request.read_with_defaults(OF_ANOTHER_RUN if came else ()).recipe


def with_held(costs: LayerCosts, recipe: Recipe) -> LayerCosts:
    """Return the costs, with the memory reserved that images of the recipe take on each GPU.

    Raises DataError for data that cannot be read.
    """
    if costs.hardware.device == "cuda":
        costs.reserve(held_bytes(recipe, costs.whole))
    return costs
