"""Masking: rates, reconstruction and distributions, against independent formulas and other implementations."""

import math
from collections import Counter

import numpy as np
import pytest

from vitpar.data.shards.manifest import Specials
from vitpar.data.text.masking import mlm, shift_right, span_lengths, spans
from vitpar.errors import DataError

VOCABULARY = 200
SENTINELS = tuple(range(VOCABULARY - 1, VOCABULARY - 41, -1))
SPECIALS = Specials(pad=0, cls=1, sep=2, mask=3, eos=4, unk=5, sentinels=SENTINELS)
PLAIN = sorted(set(range(VOCABULARY)) - set(SPECIALS.all))


def batch(size: int, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids, lengths from 1 to `tokens`, and keys."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, tokens + 1, size)
    lengths[0] = tokens
    ids = np.where(np.arange(tokens) < lengths[:, None], draw.choice(PLAIN, (size, tokens)), SPECIALS.pad)
    return ids, lengths, draw.integers(0, 1 << 62, size)


def within(count: int, trials: int, share: float) -> bool:
    """Return whether a count is within 5 standard deviations of a binomial distribution."""
    return abs(count - trials * share) < 5 * math.sqrt(trials * share * (1 - share)) + 1


def test_targets_are_the_rounded_rate_and_never_special():
    ids, lengths, keys = batch(300, 40)
    ids[:, 0] = SPECIALS.cls
    ids[np.arange(300), lengths - 1] = SPECIALS.sep
    inputs, targets = mlm(ids, lengths, keys, SPECIALS, VOCABULARY)
    chosen = targets != -1
    plain = np.isin(ids, PLAIN) & (np.arange(40) < lengths[:, None])
    assert not (chosen & ~plain).any() and (targets[chosen] == ids[chosen]).all()
    assert (inputs[~chosen] == ids[~chosen]).all()
    for count, number in zip(plain.sum(1), chosen.sum(1), strict=True):
        assert number == (max(1, round(count * 0.15)) if count else 0)


def test_targets_are_masked_replaced_or_kept_at_berts_rates():
    ids, lengths, keys = batch(4000, 64, seed=1)
    inputs, targets = mlm(ids, lengths, keys, SPECIALS, VOCABULARY)
    chosen = targets != -1
    total, masked = int(chosen.sum()), int((inputs[chosen] == SPECIALS.mask).sum())
    drawn = inputs[chosen & (inputs != SPECIALS.mask) & (inputs != ids)]
    assert within(masked, total, 0.8)
    assert within(len(drawn), total, 0.1 * (1 - 1 / len(PLAIN)))  # a random token may be the original
    counts = Counter(drawn.tolist())
    assert set(counts) == set(PLAIN) and all(within(counts[i], len(drawn), 1 / len(PLAIN)) for i in PLAIN)
    full = lengths >= 60
    assert all(within(int(n), int(full.sum()), 0.15) for n in chosen[full][:, :60].sum(0)), "every place equally"


def test_masks_depend_on_the_key_alone():
    ids, lengths, keys = batch(8, 32)
    whole = mlm(ids, lengths, keys, SPECIALS, VOCABULARY)
    part = mlm(ids[3:5], lengths[3:5], keys[3:5], SPECIALS, VOCABULARY)
    assert all(np.array_equal(a[3:5], b) for a, b in zip(whole, part, strict=True))
    assert not np.array_equal(whole[1], mlm(ids, lengths, keys + 1, SPECIALS, VOCABULARY)[1])
    noise, part = (spans(ids[rows], lengths[rows], keys[rows], SPECIALS) for rows in (slice(None), slice(3, 5)))
    assert all(np.array_equal(a[3:5], b) for a, b in zip(noise, part, strict=True))


def test_whole_words_are_chosen_together_in_random_order_until_the_rate():
    ids, lengths, keys = batch(500, 60, seed=2)
    ids[:, 0] = SPECIALS.cls
    words = np.random.default_rng(3).integers(0, 2, ids.shape).cumsum(1)
    _, targets = mlm(ids, lengths, keys, SPECIALS, VOCABULARY, whole_words=words)
    plain = np.isin(ids, PLAIN) & (np.arange(60) < lengths[:, None])
    firsts: Counter[int] = Counter()
    for row in range(500):
        wanted, found = max(1, round(plain[row].sum() * 0.15)), targets[row] != -1
        sizes = Counter(words[row][plain[row]].tolist())
        chosen = Counter(words[row][found].tolist())
        assert all(sizes[word] == number for word, number in chosen.items()), "a word is chosen completely"
        left = min((size for word, size in sizes.items() if word not in chosen), default=10**9)
        total = sum(chosen.values())
        assert (bool(sizes) == bool(chosen)) and (len(chosen) <= 1 or total <= wanted) and total + left > wanted
        firsts.update(chosen)
    share = sum(targets[row, 1:].max() != -1 for row in range(500)) / 500
    assert share > 0.98 and abs((targets != -1).sum() / plain.sum() - 0.15) < 0.01


def test_inputs_and_targets_of_spans_give_the_text_back():
    ids, lengths, keys = batch(600, 50, seed=4)
    found = spans(ids, lengths, keys, SPECIALS)
    assert (found.inputs.shape[1], found.targets.shape[1]) == span_lengths(50)
    assert found.lengths.max() == found.inputs.shape[1] and (found.targets[0] != -1).all(), "a full one fills both"
    for row, length in enumerate(lengths.tolist()):
        text = ids[row, :length].tolist()
        inputs, targets = found.inputs[row, : found.lengths[row]].tolist(), found.targets[row].tolist()
        assert (found.inputs[row, found.lengths[row] :] == SPECIALS.pad).all()
        targets = targets[: targets.index(-1)] if -1 in targets else targets
        assert inputs.pop() == targets.pop() == SPECIALS.eos
        pieces: dict[int, list[int]] = {}
        for token in targets:
            pieces.setdefault(token, []) if token in SPECIALS.sentinels else pieces[[*pieces][-1]].append(token)
        back = [token for place in inputs for token in (pieces[place] if place in SPECIALS.sentinels else [place])]
        assert back == text
        noise = min(max(round(length * 0.15), 1), max(length - 1, 0))
        assert [*pieces] == list(SPECIALS.sentinels[: len(pieces)]) == [i for i in inputs if i in SPECIALS.sentinels]
        assert sum(map(len, pieces.values())) == noise and len(pieces) == (max(round(noise / 3), 1) if noise else 0)
        assert not pieces or (inputs[0] == text[0] and all(pieces.values()))


def test_all_divisions_into_spans_are_equally_likely():
    """12 tokens, 6 of them removed in 2 spans, have 5 divisions of the removed ones times 5 of the kept ones."""
    size = 10_000
    found = spans(np.full((size, 12), 50), np.full(size, 12), np.arange(size), SPECIALS, rate=0.5)
    divisions: Counter[tuple[int, int]] = Counter()
    for row in range(size):
        kept = int((found.inputs[row] == SPECIALS.sentinels[0]).argmax())
        removed = int((found.targets[row] == SPECIALS.sentinels[1]).argmax()) - 1
        divisions[kept, removed] += 1
    assert len(divisions) == 25 and all(within(number, size, 1 / 25) for number in divisions.values())


def t5_lengths(inputs_length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """Compute lengths as T5's `compute_input_and_target_lengths`, copied by hand."""

    def lengths(tokens_length: int) -> tuple[int, int]:
        num_noise = round(tokens_length * noise_density)
        num_spans = round(num_noise / mean_noise_span_length)
        return tokens_length - num_noise + num_spans + 1, num_noise + num_spans + 1

    tokens_length = inputs_length
    while lengths(tokens_length + 1)[0] <= inputs_length:
        tokens_length += 1
    return tokens_length, lengths(tokens_length)[1]


def test_lengths_are_those_of_t5():
    assert span_lengths(568) == (512, 114) and span_lengths(569)[0] > 512
    for inputs in range(24, 600):
        for rate, mean in ((0.15, 3.0), (0.3, 5.0)):
            tokens, targets = t5_lengths(inputs, rate, mean)
            assert span_lengths(tokens, rate, mean)[1] == targets
            assert span_lengths(tokens, rate, mean)[0] <= inputs < span_lengths(tokens + 1, rate, mean)[0]


def test_decoder_inputs_are_shifted_targets():
    assert shift_right(np.array([[7, 8, 4, -1, -1]]), SPECIALS).tolist() == [[0, 7, 8, 4, 0]]


def test_missing_tokens_are_named():
    ids, lengths, keys = batch(2, 64)
    with pytest.raises(DataError, match="no mask token"):
        mlm(ids, lengths, keys, Specials(), VOCABULARY)
    with pytest.raises(DataError, match="no end token"):
        spans(ids, lengths, keys, Specials(sentinels=(9,)))
    with pytest.raises(DataError, match=r"64 tokens have 3 masked spans.* only 2 sentinels"):
        spans(ids, lengths, keys, Specials(eos=1, sentinels=(9, 8)))
