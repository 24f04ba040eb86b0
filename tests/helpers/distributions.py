"""Two-sample comparison of distributions."""

import numpy as np
from numpy.typing import ArrayLike


def distance(one: ArrayLike, other: ArrayLike) -> float:
    """Return the largest distance between the distribution functions of two samples."""
    samples = [np.sort(np.ravel(sample)) for sample in (one, other)]
    points = np.concatenate(samples)
    shares = [np.searchsorted(sample, points, side="right") / len(sample) for sample in samples]
    return float(np.abs(shares[0] - shares[1]).max())


def assert_same_distribution(ours: ArrayLike, theirs: ArrayLike, name: str = "") -> None:
    """Fail if two samples have different distributions, by the two-sample Kolmogorov-Smirnov test.

    Equal distributions fail with a probability of at most 2e-6. Seeds are fixed, so a test fails always or never.
    """
    sizes = [np.size(sample) for sample in (ours, theirs)]
    assert min(sizes) >= 1000, "too few numbers to tell distributions apart"
    found, critical = distance(ours, theirs), 2.63 * np.sqrt(1 / sizes[0] + 1 / sizes[1])
    assert found < critical, f"{name}: distance {found:.4f}, where {critical:.4f} is the largest by chance"
