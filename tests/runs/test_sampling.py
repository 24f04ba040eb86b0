"""Thinning keeps spikes and breaks lines at gaps; smoothing invents no values."""

import itertools

import numpy as np

from vitpar.runs.charts import drawn_rows, shared_steps, smoothed
from vitpar.runs.metrics import Column


def drawn(x: Column, y: Column, columns: int = 400) -> tuple[list[float], list[int]]:
    """Return the values of a line that are drawn, and the places of those before which it is interrupted."""
    rows, breaks = drawn_rows(x, y, shared_steps([(x, y)], columns), columns)
    return y[rows].tolist(), breaks.tolist()


def test_every_spike_stays() -> None:
    draw = np.random.default_rng(0)
    x, y = np.arange(100_000.0), draw.normal(size=100_000)
    spikes = {12_345: 1e6, 12_346: -1e6, 99_999: 50.0, 0: -77.0}
    for index, value in spikes.items():
        y[index] = value
    kept = shared_steps([(x, y)], 400)
    assert len(kept) <= 802 and set(spikes) <= set(kept.tolist())
    edges = np.linspace(0, x[-1], 401)
    edges[-1] += 1  # the last part includes its end
    for low, high in itertools.pairwise(edges):
        inside, those = y[(x >= low) & (x < high)], y[kept.astype(int)][(kept >= low) & (kept < high)]
        assert (those.min(), those.max()) == (inside.min(), inside.max())
    assert drawn(x, y)[1] == []


def test_missing_values_and_gaps_interrupt_a_line() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        y = np.arange(6.0)
        y[3] = bad
        assert drawn(np.arange(6.0), y) == ([0, 1, 2, 4, 5], [3])
    x = np.array([1, 2, 3, 4, 60, 61, 62.0])
    assert drawn(x, x)[1] == [4] and drawn(50 * x[:4], x[:4])[1] == []
    long = np.concatenate([np.arange(40_000.0), np.arange(60_000.0, 100_000.0)])
    values, breaks = drawn(long, long)
    assert len(breaks) == 1 and values[breaks[0] - 1 : breaks[0] + 1] == [39_999, 60_000]
    x = np.arange(100_000.0)
    values, breaks = drawn(x, np.where((x < 30_000) | (x > 50_000), x % 7, np.nan))
    assert len(breaks) == 1, "a long piece without values is a gap"
    values, breaks = drawn(x, np.where(x % 2 == 0, x, np.nan))
    assert len(values) <= 802 and breaks == [], "many missing values do not make many pieces"


def test_short_series_are_kept_complete() -> None:
    for n, y in ((1, np.array([2.3])), (60, np.sin(np.arange(60.0)))):
        assert drawn(np.arange(float(n)), y) == (y.tolist(), [])
    for x, none in (([], []), ([1.0], [np.nan])):
        assert drawn(np.array(x, dtype=float), np.array(none, dtype=float)) == ([], [])


def test_smoothing_is_the_mean_of_a_centred_window() -> None:
    y = np.array([1.0, 5.0, 3.0, np.nan, 8.0, 2.0])
    found = smoothed(y, 0.5)  # a window of 3 rows
    np.testing.assert_allclose(found, [3.0, 3.0, 4.0, np.nan, 5.0, 5.0])
    np.testing.assert_array_equal(smoothed(y, 0.01), y)
