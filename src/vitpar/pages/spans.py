"""Spans of a timeline: actions of ranks between two moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ACTIONS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
"""Names of pipeline actions by the computations of ``vitpar.planner.cost.pipeline``."""


@dataclass(frozen=True)
class Span:
    """An action of a rank in a timeline."""

    row: str
    """Row of the timeline, such as a place of the pp axis."""
    what: str
    """Part of the step, a key of ``vitpar.pages.svg.COLOURS``."""
    start: float
    """Start, from the beginning of the step."""
    end: float
    """End, from the beginning of the step."""
    microbatch: int | None = None
    """Index of the micro-batch; None for what belongs to no micro-batch."""
    stage: int = 0
    """Index of the pipeline stage."""


def rows_of(spans: Sequence[Span]) -> list[str]:
    """Return the rows of a timeline from the top; places of the pp axis in the order of their index."""
    return sorted(
        {span.row for span in spans}, key=lambda row: (int(row.removeprefix("pp ")) if "pp" in row else 0, row)
    )
