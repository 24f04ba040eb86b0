"""Names of the trackers. Imports none."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, get_args

from vitpar.errors import RecipeError
from vitpar.text import either, shown

TrackerName = Literal["tensorboard", "wandb", "trackio"]
"""Name of a tracker, which is also its package, and vitpar's extra that installs it."""


def refuse_missing(trackers: Sequence[str]) -> None:
    """Raise RecipeError for the first tracker that is unknown or whose package is not installed. Imports none."""
    for name in trackers:
        if name not in get_args(TrackerName):
            raise RecipeError(f"unknown tracker '{shown(name)}': use {either(get_args(TrackerName))}")
        try:
            spec = find_spec(name)
        except ValueError:  # a module without a spec
            spec = None
        # A folder of this name, such as the one that W&B writes, is a namespace package without an origin.
        if spec is None or spec.origin is None:
            raise RecipeError(f"the package of the tracker '{name}' is not installed: pip install -e '.[{name}]'")
