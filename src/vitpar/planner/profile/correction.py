"""What measured plans say about profiles: factors that bring predictions nearer to them, put into the profiles and
named there. Nothing is corrected unasked, since errors that are hidden are not mended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitpar.planner.profile.hardware import Hardware
from vitpar.planner.profile.model import ModelProfile

LEAST, MOST = 0.2, 5.0
"""Factors beyond these mean that something else is wrong."""


@dataclass(frozen=True)
class Evidence:
    """One plan. computing, sending: seconds of a step, as predicted; together all of it. seconds: as measured. memory:
    bytes of the fullest rank, predicted and measured, None where that is not known."""

    computing: float
    sending: float
    seconds: float
    memory: tuple[float, float] | None


@dataclass(frozen=True)
class Correction:
    """computing, sending: by what predicted seconds are multiplied. memory_bytes: what every rank needs besides what is
    counted. plans: how many it comes from."""

    computing: float
    sending: float
    memory_bytes: int
    plans: int

    def __str__(self) -> str:
        return (
            f"computing x {self.computing:.3f}, sending x {self.sending:.3f}, {self.memory_bytes / 1e6:.1f} MB more a "
            f"rank, from {self.plans} plans"
        )

    def _said(self, measured: dict[str, str]) -> dict[str, str]:
        before = f"{measured['corrected']}; then " if "corrected" in measured else ""
        return {**measured, "corrected": f"{before}{self}"}

    def of(self, hardware: Hardware, model: ModelProfile) -> tuple[Hardware, ModelProfile]:
        """Both profiles with all seconds multiplied; `measured` says so."""
        reserved = hardware.reserved_bytes + self.memory_bytes
        return (
            hardware.slower(self.computing, self.sending).model_copy(
                update={"reserved_bytes": reserved, "measured": self._said(hardware.measured)}
            ),
            model.slower(self.computing, self.sending).model_copy(update={"measured": self._said(model.measured)}),
        )


def correction(evidence: Sequence[Evidence]) -> Correction:
    """The factors with the least squares of the relative errors; memory by the median. One factor for all where plans
    do not tell computing and sending apart."""
    cc = cs = ss = c = s = 0.0
    for one in evidence:
        x, y = one.computing / one.seconds, one.sending / one.seconds
        cc, cs, ss, c, s = cc + x * x, cs + x * y, ss + y * y, c + x, s + y
    determinant = cc * ss - cs * cs
    both = (c + s) / (cc + 2 * cs + ss)
    factors = both, both
    if determinant > 1e-6 * cc * ss:
        apart = (ss * c - cs * s) / determinant, (cc * s - cs * c) / determinant
        if all(LEAST <= factor <= MOST for factor in apart):
            factors = apart
    differences = sorted(measured - predicted for predicted, measured in (e.memory for e in evidence if e.memory))
    more = differences[len(differences) // 2] if differences else 0.0
    computing, sending = (min(MOST, max(LEAST, factor)) for factor in factors)
    return Correction(computing, sending, max(0, round(more)), len(evidence))
