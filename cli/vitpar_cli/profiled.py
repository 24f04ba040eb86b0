"""The profiles that a search or a validation reads, beside the recipe they have to fit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitpar.errors import PlannerError

if TYPE_CHECKING:
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.train.recipe import Recipe

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


def profiled_costs(hardware_file: Path | None, model_file: Path | None, recipe: Recipe) -> LayerCosts:
    """The costs of the recipe's model on the profiled machine. Raises PlannerError where profiles and recipe are not of
    the same model, precision and kind of device."""
    from vitpar.models import ViTConfig
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.profile.hardware import read_hardware
    from vitpar.planner.profile.model import read_model_profile

    hardware = read_hardware(hardware_file or Path("hardware.json"))
    path = model_file or Path("model.json")
    profile = read_model_profile(path)
    config = ViTConfig(**profile.model)
    wanted = asdict(recipe.config(config.num_classes))
    for field, value in asdict(config).items():
        if field != "name" and value != wanted[field]:
            raise PlannerError(
                f"{path} is of a model with {field} {value} but the recipe's has {wanted[field]}: profile the recipe's "
                "model by vitpar profile model --recipe, or name the recipe that was profiled"
            )
    trained = {"precision": recipe.train.precision, "compile": recipe.train.compile}
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
