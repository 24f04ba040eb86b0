"""Comparing two samples of numbers."""

import numpy as np
from numpy.typing import ArrayLike


def assert_same_distribution(ours: ArrayLike, theirs: ArrayLike, name: str = "") -> None:
    """Fail where two samples are not of one distribution, by the test of Kolmogorov and Smirnov.

    Samples that are of one fail with a probability of 2e-6 at most; seeds are fixed, so they fail always or never.
    """
    one, other = np.sort(np.ravel(ours)), np.sort(np.ravel(theirs))
    assert len(one) >= 1000 and len(other) >= 1000, "too few numbers to tell distributions apart"
    points = np.concatenate([one, other])
    shares = [np.searchsorted(sample, points, side="right") / len(sample) for sample in (one, other)]
    distance = np.abs(shares[0] - shares[1]).max()
    critical = 2.63 * np.sqrt(1 / len(one) + 1 / len(other))
    assert distance < critical, f"{name}: distance {distance:.4f}, where {critical:.4f} is the largest by chance"
