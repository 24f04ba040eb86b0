"""Facts about a run that trackers get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrackedRun:
    """Facts about a run that trackers log before the first step."""

    folder: str
    """Absolute path of the run's folder."""
    id: str
    """Identifier of the run for trackers that need one; a resumed run keeps it."""
    name: str
    """Name of the run."""
    project: str
    """Project that the run belongs to, where a tracker has projects."""
    online: bool
    """Whether W&B sends to its server."""
    done: int
    """Step after which this process starts; 0 for a new run."""
    tracked: int
    """Last step that an earlier process of this run has passed to this tracker; 0 if none has."""
    resumed: bool
    """Whether an earlier process of this run has used this tracker."""
    recipe: Mapping[str, Mapping[str, Any]]
    """Settings of the recipe, by section and name."""
    facts: Mapping[str, Any]
    """Model, data, plan and hardware."""
    texts: Mapping[str, str]
    """Files of the run by name, for trackers that show text."""

    @property
    def hyper_parameters(self) -> dict[str, str | bool | int | float]:
        """Settings of the recipe by dotted key. Lists become text, and settings that are not set are left out."""
        flat = {f"{section}.{key}": value for section, values in self.recipe.items() for key, value in values.items()}
        return {
            key: value if isinstance(value, str | bool | int | float) else str(value)
            for key, value in flat.items()
            if value is not None
        }
