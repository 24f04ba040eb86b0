"""The sections of a recipe: every setting with its type, range, default and effect.

input: [task], [model], [data], [stream], [augment]. training: [optimizer], [lr_schedule], [lora], [train], [distill],
[loss_scale].
running: [checkpoint], [faults], [parallel], [communication], [track].
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from vitpar.io import user_path


class Section(BaseModel):
    """A section of a recipe: refuses unknown keys, infinite numbers and changes.

    The docstring below each field is its description in `vitpar settings` and docs/settings.md.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _home(cls, value: Any) -> Any:
        # Only paths begin with ~, and the recipe of a run has them as they are used.
        if isinstance(value, list | tuple):
            return [cls._home(each) for each in value]
        return user_path(value) if isinstance(value, str) else value
