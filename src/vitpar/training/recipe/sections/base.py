"""Base class of the sections of a recipe."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of a recipe: refuses unknown keys, infinite numbers and changes.

    The docstring below each field is its description in `vitpar settings` and docs/settings.md.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
