"""Expected calibration error by the formula of Guo et al. 2017 (arXiv:1706.04599)."""

from itertools import pairwise
from typing import Any

import numpy as np


def expected_calibration_error(confidence: Any, correct: Any, bins: int = 15) -> float:
    """Return the mean over bins of |accuracy - confidence|, weighted by the samples of the bin.

    confidence, correct: arrays with a number for each sample.
    """
    total, edges = 0.0, np.linspace(0, 1, bins + 1)
    for low, high in pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return float(total)
