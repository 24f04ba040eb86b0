"""Profiles as JSON files: written whole, and checked key by key when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field, ValidationError

from vitpar import records
from vitpar.errors import PlannerError
from vitpar.io import read_bytes, write_text
from vitpar.limits import MAX_AMOUNT, MAX_MEASURE, MAX_PROFILE_BYTES, MAX_RANKS, MAX_RATE
from vitpar.records import first_wrong, table_of, text
from vitpar.text import shown

Seconds = Annotated[float, Field(ge=1 / MAX_MEASURE, le=MAX_MEASURE)]
"""Seconds of something that takes time."""
Measure = Annotated[float, Field(ge=0, le=MAX_MEASURE)]
"""Any other, or seconds of what may take none."""
Factor = Annotated[float, Field(ge=1, le=MAX_MEASURE)]
Rate = Annotated[float, Field(ge=1, le=MAX_RATE)]
"""Bytes or operations a second."""
Amount = Annotated[int, Field(ge=1, le=MAX_AMOUNT)]
"""Bytes, elements or operations."""
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Notes = Annotated[dict[str, str], table_of(text)]


class ProfileRecord(records.Record):
    """Base of everything in a profile: unknown keys are errors, numbers are finite, values never change."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Profile(ProfileRecord):
    """Base of the two profiles. kind: hardware or model, as ``vitpar profile`` calls them."""

    kind: ClassVar[str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The profile in the JSON file `path`. Raises PlannerError, naming the key that is wrong."""
        try:
            return cls.model_validate_json(read_bytes(path, MAX_PROFILE_BYTES))
        except OSError as error:
            raise PlannerError(
                f"cannot read the {cls.kind} profile {shown(path)}: {error.strerror}: make one with vitpar profile "
                f"{cls.kind}, or plan from a data sheet with --cluster 8xH100"
            ) from None
        except ValidationError as error:
            wrong = f"{shown(path)} is not a {cls.kind} profile, {first_wrong(error)}"
            raise PlannerError(f"{wrong}: make one with vitpar profile {cls.kind}") from None

    def save(self, path: Path) -> None:
        """Write it as JSON; a reader sees the old file or the whole new one. Raises PlannerError."""
        try:
            write_text(path, self.model_dump_json(indent=1, by_alias=True) + "\n")
        except OSError as error:
            raise PlannerError(f"cannot write the {self.kind} profile {shown(path)}: {error.strerror}") from None
