"""Profiles as JSON files: written whole, and checked key by key when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from vitpar import records
from vitpar.errors import PlannerError, shown
from vitpar.files import read_bytes, write_text
from vitpar.limits import MAX_AMOUNT, MAX_MEASURE, MAX_PROFILE_BYTES, MAX_RANKS, MAX_RATE
from vitpar.records import first_wrong, table_of, text

Seconds = Annotated[float, Field(ge=1 / MAX_MEASURE, le=MAX_MEASURE)]
"""Of what takes time."""
Measure = Annotated[float, Field(ge=0, le=MAX_MEASURE)]
"""Any other, or seconds of what may take none."""
Factor = Annotated[float, Field(ge=1, le=MAX_MEASURE)]
Rate = Annotated[float, Field(ge=1, le=MAX_RATE)]
"""Bytes or operations a second."""
Amount = Annotated[int, Field(ge=1, le=MAX_AMOUNT)]
"""Bytes, elements or operations."""
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Notes = Annotated[dict[str, str], table_of(text)]


class Record(records.Record):
    """Base of everything in a profile: unknown keys are errors, numbers are finite, values never change."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


R = TypeVar("R", bound=Record)


def write_record(record: Record, path: Path, what: str) -> None:
    """Write `record`, which is called `what`; a reader sees the old file or the whole new one. Raises PlannerError."""
    try:
        write_text(path, record.model_dump_json(indent=1, by_alias=True) + "\n")
    except OSError as error:
        raise PlannerError(f"cannot write the {what} {shown(path)}: {error.strerror}") from None


def read_record(kind: type[R], path: Path, what: str, command: str) -> R:
    """The record in the JSON file `path`. Raises PlannerError, naming the key that is wrong.

    what: it is called. command: makes one.
    """
    try:
        return kind.model_validate_json(read_bytes(path, MAX_PROFILE_BYTES))
    except OSError as error:
        raise PlannerError(f"cannot read the {what} {shown(path)}: {error.strerror}") from None
    except ValidationError as error:
        raise PlannerError(f"{shown(path)} is not a {what}, {first_wrong(error)}: make one with {command}") from None
