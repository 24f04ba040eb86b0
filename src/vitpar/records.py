"""Pydantic records for untrusted files, which stop at the first error.

Pydantic collects all errors, each of about a kilobyte and some microseconds. A file that is all errors would take
gigabytes. Lists, tables and unknown keys are therefore checked so that the first error ends the validation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, FailFast, ValidationError, model_validator

from vitpar.text import shown

T = TypeVar("T")
Many = Annotated[tuple[T, ...], FailFast()]
"""Tuple of any length, validated up to its first error."""


class Record(BaseModel):
    """Base of records that refuse unknown keys. Subclasses may add settings of pydantic."""

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_key(cls, said: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if isinstance(said, dict) and (unknown := next((key for key in said if key not in known), None)) is not None:
            raise ValueError(f"unknown key '{shown(unknown)}'")
        return said


def table_of(convert: Callable[[Any], Any]) -> BeforeValidator:
    """Return a validator that checks the values of a table one by one.

    convert: converts one value, or raises ValueError.
    """

    def checked(said: Any) -> Any:
        return {key: _checked(convert, key, value) for key, value in said.items()} if isinstance(said, dict) else said

    return BeforeValidator(checked)


def _checked(convert: Callable[[Any], Any], key: object, value: Any) -> Any:
    try:
        return convert(value)
    except ValidationError as error:
        raise ValueError(f"{shown(key)}: {first_wrong(error)}") from None
    except ValueError as error:
        raise ValueError(f"{shown(key)}: {error}") from None


def text(value: Any) -> str:
    """Return `value` if it is a string.

    Raises ValueError.
    """
    if not isinstance(value, str):
        raise ValueError("it is not a string")
    return value


def first_wrong(error: ValueError) -> str:
    """Return the first error of reading a record: the key and what is wrong with it, if the text could be parsed."""
    if not isinstance(error, ValidationError):
        return f"Invalid JSON: {shown(error)}"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    said = first["msg"].removeprefix("Value error, ")
    place = ".".join(map(str, first["loc"]))
    return f"{shown(place)}: {said}" if place else said
