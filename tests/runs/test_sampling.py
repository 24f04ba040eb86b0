"""Downsampling keeps spikes, breaks lines at gaps, and smooths without inventing values."""

import itertools

import numpy as np

from vitpar.runs.sampling import envelope, smoothed


def test_every_spike_stays() -> None:
    draw = np.random.default_rng(0)
    x = np.arange(100_000.0)
    y = draw.normal(size=len(x))
    spikes = {12_345: 1e6, 12_346: -1e6, 99_999: 50.0, 0: -77.0}
    for index, value in spikes.items():
        y[index] = value
    found = envelope(x, y, 0, x[-1], 400)
    assert len(found.x) <= 800 and set(spikes.values()) <= set(found.y.tolist())
    assert (np.diff(found.x) >= 0).all(), "in the order of x"
    edges = np.linspace(0, x[-1], 401)
    edges[-1] += 1  # the last column includes its end
    for low, high in itertools.pairwise(edges):
        inside, kept = y[(x >= low) & (x < high)], found.y[(found.x >= low) & (found.x < high)]
        assert (kept.min(), kept.max()) == (inside.min(), inside.max())
    assert found.starts.sum() == 1


def test_missing_values_and_gaps_interrupt_a_line() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        y = np.arange(6.0)
        y[3] = bad
        found = envelope(np.arange(6.0), y, 0, 5, 400)
        assert found.y.tolist() == [0, 1, 2, 4, 5] and found.starts.tolist() == [1, 0, 0, 1, 0]
    x = np.array([1, 2, 3, 4, 60, 61, 62.0])
    assert envelope(x, x, 0, 62, 400).starts.tolist() == [1, 0, 0, 0, 1, 0, 0]
    assert envelope(50 * x[:4], x[:4], 0, 200, 400).starts.sum() == 1
    long = np.concatenate([np.arange(40_000.0), np.arange(60_000.0, 100_000.0)])
    assert envelope(long, long, 0, 1e5, 400).starts.sum() == 2
    x = np.arange(100_000.0)
    found = envelope(x, np.where(x % 2 == 0, x, np.nan), 0, x[-1], 400)
    assert len(found.x) <= 800 and found.starts.sum() <= 2, "many missing values do not make many pieces"


def test_smoothed_lines_have_one_point_in_each_column() -> None:
    x = np.arange(10_000.0)
    found = envelope(x, np.sin(x / 1000), 0, x[-1], 100, spikes=False)
    assert len(found.x) == 100 and (np.diff(found.x) > 0).all()
    np.testing.assert_array_equal(found.y, np.sin(found.x / 1000))


def test_short_series_are_kept_complete() -> None:
    for n, y in ((1, np.array([2.3])), (60, np.sin(np.arange(60.0)))):
        found = envelope(np.arange(float(n)), y, 0, n - 1, 400)
        np.testing.assert_array_equal(found.y, y)
        assert found.starts.tolist() == [1.0] + [0.0] * (n - 1)
    empty: list[tuple[list[float], list[float]]] = [([], []), ([1.0], [np.nan]), ([np.nan], [1.0])]
    for x, none in empty:
        assert len(envelope(np.array(x), np.array(none), 0, 1, 400).x) == 0


def test_smoothing_is_the_mean_of_a_centred_window() -> None:
    y = np.array([1.0, 5.0, 3.0, np.nan, 8.0, 2.0])
    found = smoothed(y, 0.5)  # a window of 3 rows
    np.testing.assert_allclose(found, [3.0, 3.0, 4.0, np.nan, 5.0, 5.0])
    np.testing.assert_array_equal(smoothed(y, 0.01), y)
