"""Two-sample comparison of distributions."""

import numpy as np
from numpy.typing import ArrayLike


def assert_same_distribution(ours: ArrayLike, theirs: ArrayLike, name: str = "") -> None:
    """Fail if two samples have different distributions, by the two-sample Kolmogorov-Smirnov test.

    Equal distributions fail with a probability of at most 2e-6. Seeds are fixed, so a test fails always or never.
    """
    one, other = np.sort(np.ravel(ours)), np.sort(np.ravel(theirs))
    assert len(one) >= 1000 and len(other) >= 1000, "too few numbers to tell distributions apart"
    points = np.concatenate([one, other])
    shares = [np.searchsorted(sample, points, side="right") / len(sample) for sample in (one, other)]
    distance = np.abs(shares[0] - shares[1]).max()
    critical = 2.63 * np.sqrt(1 / len(one) + 1 / len(other))
    assert distance < critical, f"{name}: distance {distance:.4f}, where {critical:.4f} is the largest by chance"
