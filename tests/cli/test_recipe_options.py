"""Command-line options that set recipe keys: the same keys and values in all commands."""

from collections.abc import Callable, Iterator
from inspect import unwrap
from pathlib import Path
from typing import Any

import click
import typer

from vitpar.training.recipe import Recipe
from vitpar_cli.check import check
from vitpar_cli.main import app
from vitpar_cli.recipe_options import settings
from vitpar_cli.train import train


def commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Callable[..., None]]]:
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from commands(part, (*words, name))
    elif command.callback is not None:
        yield " ".join(words), unwrap(command.callback)


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_options_map_to_existing_settings() -> None:
    recipe = Recipe.model_validate({"data": {"path": "x"}})
    for name, command in COMMANDS.items():
        for key in settings(command, dict.fromkeys(command.__annotations__)):
            section, _, setting = key.partition(".")
            assert setting in type(getattr(recipe, section)).model_fields, name


def test_option_values_have_recipe_types() -> None:
    left_out: dict[str, Any] = dict.fromkeys(train.__annotations__)
    given = {"split": "5,7", "weights": Path("w"), "data": Path("d"), "steps": 3, "debug_checks": True}
    found = {key: value for key, value in settings(train, left_out | given).items() if value is not None}
    assert found == {
        "parallel.split": [5, 7],
        "model.weights": "w",
        "data.path": "d",
        "train.steps": 3,
        "faults.debug_checks": True,
    }
    assert settings(train, {**left_out, "debug_checks": False, "split": "even"})["faults.debug_checks"] is None
    assert "train.batch_size" in settings(check, dict.fromkeys(check.__annotations__))
