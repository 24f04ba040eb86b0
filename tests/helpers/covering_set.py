"""Choice of the command that runs a plan of the tables, over all families of models.

`make test` runs few plans that have every feature at least once, `make test-slow` few more that have every feature with
every family that the tables have it with, and `make soak` the rest.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from helpers.modern_plans import MODERN_CASES
from helpers.plans import CASES, Case, representatives
from helpers.swin_plans import SWIN_CASES

ALL = (*CASES, *MODERN_CASES, *SWIN_CASES)
QUICK = {str(case) for case in representatives(ALL, lambda case: {case.family, *case.features})}
SLOW = {str(case) for case in representatives(ALL, lambda case: {(case.family, feature) for feature in case.features})}


def tiers(cases: Sequence[Case]) -> list[Any]:
    """Return test parameters of `cases`, small plans first, marked by the command that runs them."""
    found = []
    for case in sorted(cases, key=lambda case: case.ranks):
        name = str(case)
        marks = [] if name in QUICK else [pytest.mark.slow] if name in SLOW else [pytest.mark.soak]
        found.append(pytest.param(case, marks=marks, id=name))
    return found
