"""Warning for runs that wait for their images."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitpar.recipe import Recipe
from vitpar.text import count, either

WATCHED_STEPS = 20
"""Steps to measure before a warning, without the first, which fills the queue."""
WAITING_SHARE = 0.15
"""Fraction of the time spent waiting for images from which the user is warned."""


class InputWatch:
    """Detector of runs that wait for their images.

    workers: decoding threads of a rank.
    cores: cores of a rank; a part of one if ranks share it.
    first: number of the first step.
    small: whether the images are so small that several threads decode no more of them than one.
    """

    def __init__(self, recipe: Recipe, workers: int, cores: float, first: int = 1, *, small: bool = False) -> None:
        self._recipe, self._workers, self._cores, self._first = recipe, workers, cores, first
        self._small = small
        self._steps, self._waited, self._taken, self._said = 0, 0.0, 0.0, False

    def look(self, rows: Sequence[dict[str, Any]]) -> str | None:
        """Return a warning for the user, once in a run; else None.

        While a step waits for images, all threads decode. The images of a step then take its whole duration, so this
        many threads over the part of the time without waiting would keep up.

        rows: new rows of metrics.jsonl.
        """
        for row in rows:
            if row["step"] > self._first:
                self._steps, self._waited = self._steps + 1, self._waited + row["data_ms"]
                self._taken += row["step_ms"]
        if self._said or self._steps < WATCHED_STEPS or self._waited < WAITING_SHARE * self._taken:
            return None
        self._said = True
        waiting = self._waited / self._taken
        share = f"training waits for images {waiting:.0%} of the time"
        if self._small and self._recipe.data.cache != "device":
            return f"{share}: {either(_remedies(self._recipe, small=True, threads=self._workers))}"
        # With 0, the main thread decodes while the step waits.
        needed = math.ceil(self._workers / (1 - waiting)) if 0 < waiting < 1 and self._workers else None
        enough = f" (about {needed:,} decoding threads a rank would keep up)" if needed else ""
        if self._workers < self._cores:
            return (
                f"{share}{enough}: raise data.workers (it is {self._workers}, and a rank has {self._cores:.3g} cores "
                "here)"
            )
        threads = count(self._workers, "decoding thread")
        return f"{share}, with {threads} on {self._cores:.3g} cores a rank{enough}: {either(_remedies(self._recipe))}"


def _remedies(recipe: Recipe, *, small: bool = False, threads: int = 0) -> list[str]:
    """Return what makes input cheaper and is not done yet.

    small: whether several threads decode no more images than one.
    threads: decoding threads of a rank.
    """
    cache = recipe.data.cache
    decoded = recipe.data.path is not None and cache != "device"  # during the training
    augment = recipe.augment
    augments = augment.policy or np.any(augment.color_jitter) or augment.random_erasing
    ways = {
        "leave out data.workers, since one thread decodes small images fastest": small and threads > 1,
        "pack smaller images (`vitpar data pack --short-side`)": decoded and not small,
        "set data.cache to memory, or to device if all have one size": decoded and cache == "none",
        "set data.cache to device if all images have one size": small and cache == "memory",
        "augment less": augments,
        "use more cores": not small,
    }
    return [way for way, possible in ways.items() if possible]
