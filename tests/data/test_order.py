"""Sample order: each sample exactly once per epoch, from any start position and for any batch size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitpar.data.randomness import SampleOrder, sample_keys, shuffled


@st.composite
def orders(draw):
    block = draw(st.integers(1, 9))
    window = draw(st.sampled_from([0, 0, block, 3 * block, 40 * block]))
    return SampleOrder(
        draw(st.integers(0, 2**63 - 1)), draw(st.integers(1, 200)), draw(st.integers(1, 3)), block, window
    )


@settings(max_examples=25)
@given(order=orders(), cuts=st.lists(st.integers(1, 300), min_size=1, max_size=8), start=st.integers(0, 10**12))
def test_each_epoch_has_every_repeat_of_every_sample_exactly_once(order, cuts, start):
    """Batches have changing sizes, as in runs that resume with another batch size."""
    a_pass = order.size * order.repeats
    start -= start % a_pass
    found, position = [], start
    for size in [*cuts, a_pass]:
        found += zip(*order.batch(position, size), strict=True)
        position += size
    counts = {}
    for epoch, sample, repeat in found:
        key = (int(epoch), int(sample), int(repeat))
        counts[key] = counts.get(key, 0) + 1
    assert max(counts.values()) == 1
    first = start // a_pass
    whole = {(first, sample, repeat) for sample in range(order.size) for repeat in range(order.repeats)}
    assert whole <= set(counts)


@settings(max_examples=25)
@given(order=orders(), start=st.integers(0, 500), size=st.integers(1, 200))
def test_batch_equals_its_positions_taken_one_by_one(order, start, size):
    alone = [tuple(int(column[0]) for column in order.batch(position, 1)) for position in range(start, start + size)]
    together = list(zip(*(column.tolist() for column in order.batch(start, size)), strict=True))
    assert sorted(alone) == sorted(together) and (order.window or alone == together)


def test_epochs_and_seeds_differ():
    batches = [SampleOrder(seed, 50).batch(50 * epoch, 50)[1].tolist() for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(batch) for batch in batches}) == 6


@pytest.mark.parametrize("size", [3, 10])
def test_every_permutation_place_is_equally_likely(size):
    """A chi-squared test with a limit of five standard deviations."""
    turns = 4000
    counts = np.zeros((size, size))
    for epoch in range(turns):
        counts[np.arange(size), shuffled(np.arange(size), size, 5, epoch)] += 1
    expected, freedom = turns / size, (size - 1) ** 2
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5


def test_sample_order_is_pinned():
    """A change here would break every resumed run, so the order must not depend on a library version."""
    assert SampleOrder(0, 10).batch(0, 10)[1].tolist() == [6, 5, 7, 2, 9, 8, 1, 0, 3, 4]
    assert SampleOrder(0, 10, block=2, window=4).samples(0, np.arange(10)).tolist() == [2, 7, 8, 1, 3, 4, 5, 6, 0, 9]
    keys = sample_keys(0, np.array([0, 0, 1]), np.array([0, 1, 0]), np.array([0, 0, 1]))
    assert keys.tolist() == [1195769770526638388, 7851880781397474849, 871958892221420579]


def test_window_keeps_reads_close_together():
    """Each batch of a window lies in the window's runs, and a rank's half of a batch in half of them."""
    order = SampleOrder(3, 100_000, block=250, window=5000)
    samples = order.batch(5000, 500)[1]
    assert np.array_equal(samples, np.sort(samples))
    assert np.count_nonzero(np.diff(samples) > 250) <= 21
    halves = samples[:250], samples[250:]
    assert halves[0].max() < halves[1].min()
    window = order.batch(5000, 5000)[1]
    assert np.count_nonzero(np.diff(window) != 1) <= 20
    assert np.count_nonzero(np.diff(SampleOrder(3, 100_000).batch(5000, 5000)[1]) == 1) < 10


def test_distant_positions_need_no_table_of_all_samples():
    """A table would take a hundred megabytes for this data set."""
    order = SampleOrder(0, 14_000_000)
    epochs, samples, _ = order.batch(10**15, 8)
    assert epochs.tolist() == [10**15 // 14_000_000] * 8 and len(set(samples.tolist())) == 8
