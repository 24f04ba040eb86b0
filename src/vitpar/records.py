"""Pydantic records of files."""

from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from vitpar.text import shown

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""Count that NumPy can hold as int64."""


class Record(BaseModel):
    """Base of records that refuse unknown keys. Subclasses may add settings of pydantic."""

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_key(cls, said: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if isinstance(said, dict) and (unknown := next((key for key in said if key not in known), None)) is not None:
            raise ValueError(f"unknown key '{shown(unknown)}'")
        return said


def first_wrong(error: ValueError) -> str:
    """Return the first error of reading a record: the key and what is wrong with it, if the text could be parsed."""
    if not isinstance(error, ValidationError):
        return f"Invalid JSON: {shown(error)}"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    said = first["msg"].removeprefix("Value error, ")
    place = ".".join(map(str, first["loc"]))
    return f"{shown(place)}: {said}" if place else said
