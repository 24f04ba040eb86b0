"""Base classes of profiles in JSON files: written atomically, and checked key by key when read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field

from vitpar import records
from vitpar.errors import PlannerError
from vitpar.io import read_json, write_text
from vitpar.limits import MAX_AMOUNT, MAX_MEASURE, MAX_RANKS
from vitpar.records import first_wrong
from vitpar.text import shown

Seconds = Annotated[float, Field(ge=1 / MAX_MEASURE, le=MAX_MEASURE)]
"""Positive seconds."""
Measure = Annotated[float, Field(ge=0, le=MAX_MEASURE)]
"""Seconds or any other measure that may be 0."""
Share = Annotated[float, Field(ge=1e-3, le=1)]
"""Part of a published rate that is reached, up to 1."""
Factor = Annotated[float, Field(ge=1, le=MAX_MEASURE)]
"""Slow-down, 1 or more."""
Rate = Annotated[float, Field(ge=1, le=1e18)]
"""Bytes or operations per second."""
Amount = Annotated[int, Field(ge=1, le=MAX_AMOUNT)]
"""Positive number of bytes, elements or operations."""
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
"""Number of ranks."""
Notes = dict[str, str]
"""Free-text notes by key."""


class ProfileRecord(records.Record):
    """Base of all records in a profile: immutable, with finite numbers, unknown keys refused."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Profile(ProfileRecord):
    """Base of the hardware and the model profile."""

    subject: ClassVar[str]
    """Name of the subcommand of ``vitpar profile``: hardware or model."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the profile in the JSON file `path`. Raises PlannerError, which names an invalid key."""
        try:
            return cls.model_validate(read_json(path))
        except OSError as error:
            raise PlannerError(
                f"cannot read the {cls.subject} profile {shown(path)}: {error.strerror}: make one with `vitpar profile "
                f"{cls.subject}`, or plan from a data sheet with --cluster 8xH100"
            ) from None
        except ValueError as error:
            wrong = f"{shown(path)} is not a {cls.subject} profile, {first_wrong(error)}"
            raise PlannerError(f"{wrong}: make one with `vitpar profile {cls.subject}`") from None

    def save(self, path: Path) -> None:
        """Write the profile as JSON, atomically: a reader sees the old file or the complete new one.

        Raises PlannerError.
        """
        try:
            write_text(path, self.model_dump_json(indent=1, by_alias=True) + "\n")
        except OSError as error:
            raise PlannerError(f"cannot write the {self.subject} profile {shown(path)}: {error.strerror}") from None
