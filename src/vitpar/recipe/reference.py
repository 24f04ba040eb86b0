"""Reference of all settings, from the fields of the sections: `vitpar settings` prints it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen

from vitpar.errors import RecipeError
from vitpar.intervals import Interval
from vitpar.limits import MAX_COUNT
from vitpar.recipe.other_names import OTHER_NAMES
from vitpar.recipe.recipe import Recipe
from vitpar.text import nearest, shown


@dataclass(frozen=True)
class Setting:
    """One key of a recipe."""

    key: str
    """Dotted, such as train.batch_size."""
    kind: str
    """Type, choices and range, in words."""
    default: str
    """Default as TOML; "unset" where there is none."""
    effect: str
    """Effect of the setting, with its unit."""


def settings() -> Iterator[Setting]:
    """Yield every setting, in the order of the sections."""
    for section, field in Recipe.model_fields.items():
        for name, setting in field.annotation.model_fields.items():  # type: ignore[union-attr]
            effect = " ".join((setting.description or "").split())
            kind = _type(setting.annotation) + _range(setting.metadata)
            yield Setting(f"{section}.{name}", kind, _toml(setting.default), effect)


def find(key: str) -> list[Setting]:
    """Return the settings that `key` names.

    key: dotted key of a setting, a section for all of its settings, or the last part of a key here or in other tools.

    Raises RecipeError.
    """
    every = list(settings())
    matching = [one for one in every if key == one.key.partition(".")[0]]
    if not matching:
        key = OTHER_NAMES.get(key.rpartition(".")[2], key)
    matching = matching or [one for one in every if key in (one.key, one.key.partition(".")[2])]
    if not matching:
        names = {name for one in every for name in (one.key, *one.key.split("."))}
        raise RecipeError(f"unknown setting '{shown(key)}'{nearest(key, names)}: `vitpar settings` lists all")
    return matching


def about(section: str) -> str:
    """Return the docstring of a section, in one paragraph."""
    return " ".join((Recipe.model_fields[section].annotation.__doc__ or "").split())


def _toml(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, Interval):
        value = str(value)
    if isinstance(value, float) and 0 < value < 1e-3:
        return f"{value:g}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


_NAMES = {Interval: "interval", str: "string", int: "integer", float: "number", bool: "true or false"}
"""Name of each type for users."""


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_type(one) for one in arguments if one is not NoneType)
    if origin is Literal:
        words = [json.dumps(one) for one in arguments]
        return f"{', '.join(words[:-1])} or {words[-1]}"
    if origin is tuple:
        if get_origin(arguments[0]) is Literal:
            return f"list of {_type(arguments[0])}"
        return f"list of {_type(arguments[0])}s" if Ellipsis in arguments else f"{len(arguments)} numbers"
    if origin is dict:
        return "table"
    return _NAMES[annotation]


def _range(metadata: list[Any]) -> str:
    """Return the range in words, without bounds that only guard against nonsense."""
    words = ""
    for bound in metadata:
        match bound:
            case Ge(ge=least):
                words += f" from {least}"
            case Gt(gt=least):
                words += f" above {least}"
            case Le(le=most) if isinstance(most, int | float) and most < min(MAX_COUNT, 10**6):
                words += f" to {most}"
            case Lt(lt=most) if isinstance(most, int | float) and most < 10**6:
                words += f" below {most}"
            case MaxLen(max_length=most):
                words += f", {most} at most"
    return words
