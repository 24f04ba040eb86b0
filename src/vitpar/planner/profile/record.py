"""Profiles as JSON files: written whole, and checked key by key when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from vitpar.errors import PlannerError
from vitpar.files import write_text


class Record(BaseModel):
    """Base of everything in a profile: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


R = TypeVar("R", bound=Record)


def write_record(record: Record, path: Path, what: str) -> None:
    """Write `record`, which is called `what`; a reader sees the old file or the whole new one. Raises PlannerError."""
    try:
        write_text(path, record.model_dump_json(indent=1, by_alias=True) + "\n")
    except OSError as error:
        raise PlannerError(f"cannot write the {what} {path}: {error.strerror}") from None


def read_record(kind: type[R], path: Path, what: str, command: str) -> R:
    """The record in the JSON file `path`. Raises PlannerError, naming the key that is wrong.

    what: it is called. command: makes one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlannerError(f"cannot read the {what} {path}: {why}") from None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise PlannerError(f"{path} is not a {what}, {place}: {first['msg']}: make one with {command}") from None
