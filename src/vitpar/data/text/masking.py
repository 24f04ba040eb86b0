"""Masked tokens as in BERT, and masked spans as in T5.

Both are pure functions of ids, lengths and keys, with random numbers that are computed from the keys alone. So they are
equal on every rank, under every plan and after a resume. They take and return numpy arrays for a complete batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import uniforms
from vitpar.errors import DataError
from vitpar.models.config import IGNORED

if TYPE_CHECKING:
    from vitpar.data.shards.manifest import Specials

Ids = NDArray[np.int64]
"""Numbers of tokens, or counts of them."""

_CHOICE, _KIND, _TOKEN, _NOISE, _CLEAN = range(0x7E10, 0x7E15)  # which random number of a key
MASKED, REPLACED = 0.8, 0.1
"""Parts of BERT's targets whose input becomes the mask token, and a random one; the others stay."""


def mlm(
    ids: Ids,
    lengths: Ids,
    keys: Ids,
    specials: Specials,
    vocab_size: int,
    rate: float = 0.15,
    whole_words: Ids | None = None,
) -> tuple[Ids, Ids]:
    """Choose targets of masked language modelling (BERT, arXiv:1810.04805) and mask the inputs.

    Of a sequence with n tokens that are not special, round(rate · n) are targets, at least 1. 80 % of them become the
    mask token, 10 % a random token that is not special, and 10 % stay.

    ids: int64 [batch, tokens].
    lengths: tokens of each sequence, int64 [batch]; what follows is never chosen.
    keys: random key of each sequence, int64 [batch].
    vocab_size: number of tokens in the vocabulary.
    rate: part of the tokens that are targets, from 0 to 1.
    whole_words: number of each token's word in its sequence (`WordTable.words`), int64 [batch, tokens]. Then words are
        chosen completely, in random order, as long as they fit into the number of targets; the first always fits.
        Each token of a word is masked, replaced or left on its own, as in BERT.

    Returns the inputs, and the targets with IGNORED (-1) where there is none: int64 [batch, tokens] both.

    Raises DataError for specials without a mask token.
    """
    if specials.mask is None:
        raise DataError("the tokenizer has no mask token, such as [MASK] or <mask>: use another one, or spans")
    maskable = np.arange(ids.shape[1]) < lengths[:, None]
    special = np.zeros(vocab_size, bool)
    special[[token for token in specials.all if token < vocab_size]] = True
    maskable &= ~special[ids]
    counts = maskable.sum(1)
    wanted = np.minimum(np.maximum(np.rint(counts * rate).astype(np.int64), 1), counts)
    if whole_words is None:
        scores = np.where(maskable, _grid(keys, ids.shape[1], _CHOICE), 2.0)
        chosen = _ranks(scores) < wanted[:, None]
    else:
        chosen = _whole(whole_words, maskable, wanted, keys)
    rows, places = np.nonzero(chosen)
    kind = uniforms(keys[rows], _KIND, places)
    plain = np.flatnonzero(~special)
    drawn = plain[(uniforms(keys[rows], _TOKEN, places) * len(plain)).astype(np.int64)]
    masked, replaced = kind < MASKED, (kind >= MASKED) & (kind < MASKED + REPLACED)
    inputs = ids.copy()
    inputs[rows, places] = np.where(masked, specials.mask, np.where(replaced, drawn, ids[rows, places]))
    return inputs, np.where(chosen, ids, IGNORED)


def _whole(words: Ids, maskable: NDArray[np.bool_], wanted: Ids, keys: Ids) -> NDArray[np.bool_]:
    """Return the tokens of randomly chosen words, bool [batch, tokens].

    wanted: largest number of tokens in each sequence, int64 [batch], which only a first word exceeds.
    """
    batch, tokens = words.shape
    rows = np.arange(batch)
    words = np.where(maskable, words - words.min(1, keepdims=True), tokens)  # a last column for the other tokens
    sizes = np.zeros((batch, tokens + 1), np.int64)
    np.add.at(sizes, (rows[:, None], words), 1)
    sizes = sizes[:, :tokens]
    order = np.argsort(np.where(sizes > 0, _grid(keys, tokens, _CHOICE), 2.0), axis=1, kind="stable")
    left, taken = wanted.copy(), np.zeros((batch, tokens + 1), bool)
    for turn in range(tokens):
        word = order[:, turn]
        size = sizes[rows, word]
        take = (size > 0) & ((size <= left) | ((turn == 0) & (left > 0)))
        taken[rows, word] |= take
        left -= np.where(take, size, 0)
        if (left <= 0).all() or not size.any():
            break
    chosen: NDArray[np.bool_] = taken[rows[:, None], words] & maskable
    return chosen


class Spans(NamedTuple):
    """Batch of T5: texts with sentinels for the missing spans, and the spans."""

    inputs: Ids
    """Ids for the encoder, padded with the pad token, int64 [batch, span_lengths(tokens)[0]]."""
    targets: Ids
    """Ids that the decoder predicts, padded with IGNORED (-1), int64 [batch, span_lengths(tokens)[1]]."""
    lengths: Ids
    """Number of ids in each input, int64 [batch]; 0 for padding of the batch."""


def spans(ids: Ids, lengths: Ids, keys: Ids, specials: Specials, rate: float = 0.15, mean_length: float = 3.0) -> Spans:
    """Replace random spans of each sequence by sentinels (T5, arXiv:1910.10683).

    Spans to keep and to remove alternate, beginning with one to keep, with the lengths of T5's
    `random_spans_noise_mask`. Inputs have a sentinel for each removed span, targets a sentinel and the span; both end
    with eos.

    ids: int64 [batch, tokens].
    lengths: tokens of each sequence, int64 [batch].
    keys: random key of each sequence, int64 [batch].
    rate: part of the tokens to remove, above 0 and below 1.
    mean_length: mean length of a removed span in tokens, 1 or more.

    Raises DataError for specials without eos and sep, or with too few sentinels.
    """
    if specials.end is None:
        raise DataError("the tokenizer has no end token, such as </s>: use another one")
    batch, tokens = ids.shape
    noise, number = _noise_and_spans(np.arange(tokens + 1), rate, mean_length)
    if number.max() > len(specials.sentinels):
        raise DataError(
            f"sequences of {tokens} tokens have {number.max()} masked spans, but the tokenizer only "
            f"{len(specials.sentinels)} sentinels such as <extra_id_0>: use T5's, shorter sequences, or longer spans"
        )
    noise, number = noise[lengths], number[lengths]
    inside = np.arange(tokens) < lengths[:, None]
    # As in T5, a sequence of 1 token is the beginning of one of 2, and keeps it.
    clean = _segments(np.maximum(lengths, 2) - noise, number, _grid(keys, tokens, _CLEAN))
    gone = _segments(noise, number, _grid(keys, tokens, _NOISE))
    order = np.concatenate([2 * clean, 2 * gone + 1], axis=1)
    is_noise = inside & (np.sort(order, axis=1)[:, :tokens] % 2 == 1)
    starts = is_noise.copy()
    starts[:, 1:] &= ~is_noise[:, :-1]
    sentinels = np.append(np.array(specials.sentinels, np.int64), 0)
    span = np.cumsum(starts, axis=1) - 1  # number of the removed span that begins here, or began last
    marks = sentinels[np.maximum(span, 0)]
    in_length, target_length = span_lengths(tokens, rate, mean_length)
    rows = np.flatnonzero(lengths > 0)

    # Inputs: kept tokens, and the first of every removed span as its sentinel.
    inputs = np.full((batch, in_length), specials.padding, np.int64)
    in_counts = _fill(inputs, np.where(starts, marks, ids), inside & (~is_noise | starts))
    inputs[rows, in_counts[rows]] = specials.end

    # Targets: removed tokens, each first one after its sentinel.
    targets = np.full((batch, target_length), IGNORED, np.int64)
    pairs, chosen = np.stack([marks, ids], axis=2), np.stack([starts, is_noise], axis=2)
    out_counts = _fill(targets, pairs.reshape(batch, -1), chosen.reshape(batch, -1))
    targets[rows, out_counts[rows]] = specials.end
    return Spans(inputs, targets, np.where(lengths > 0, in_counts + 1, 0))


def _fill(into: Ids, values: Ids, chosen: NDArray[np.bool_]) -> Ids:
    """Write the chosen `values` of each row of a batch into `into` without gaps; return their number in each row."""
    counts: Ids = chosen.sum(1)
    into[np.arange(into.shape[1]) < counts[:, None]] = values[chosen]
    return counts


def _noise_and_spans(lengths: Ids, rate: float, mean_length: float) -> tuple[Ids, Ids]:
    """Return the number of tokens that T5 removes from sequences of these lengths, and of spans that they are in."""
    longer = np.maximum(lengths, 2)
    noise = np.clip(np.rint(longer * rate).astype(np.int64), 1, longer - 1)
    number = np.maximum(np.rint(noise / mean_length).astype(np.int64), 1)
    return noise, np.minimum(number, longer - noise)


def _segments(items: Ids, segments: Ids, scores: NDArray[np.float64]) -> Ids:
    """Divide `items` into `segments` parts of at least 1, all divisions equally likely.

    scores: random numbers, float64 [batch, tokens].

    Returns the part of each item, int64 [batch, tokens]; `tokens` in the places after the last one.
    """
    batch, tokens = scores.shape
    place = np.arange(tokens)
    # `segments - 1` of the `items - 1` places between items are cuts.
    cut = _ranks(np.where(place < (items - 1)[:, None], scores, 2.0)) < (segments - 1)[:, None]
    part = np.zeros((batch, tokens), np.int64)
    part[:, 1:] = cut.cumsum(1)[:, :-1]
    return np.where(place < items[:, None], part, tokens)


def span_lengths(tokens: int, rate: float = 0.15, mean_length: float = 3.0) -> tuple[int, int]:
    """Return the lengths of T5's inputs and targets for sequences of at most `tokens` tokens, with their eos."""
    noise, number = (int(part[0]) for part in _noise_and_spans(np.array([tokens]), rate, mean_length))
    return max(tokens, 2) - noise + number + 1, noise + number + 1


def shift_right(targets: Ids, specials: Specials) -> Ids:
    """Return the inputs of T5's decoder: the pad token, and then all targets but the last; int64 [batch, targets]."""
    inputs = np.full_like(targets, specials.padding)
    inputs[:, 1:] = np.where(targets[:, :-1] == IGNORED, specials.padding, targets[:, :-1])
    return inputs


def _grid(keys: Ids, tokens: int, which: int) -> NDArray[np.float64]:
    """Return random number `which` of every place of every sequence, uniform in [0, 1): float64 [batch, tokens]."""
    return uniforms(keys[:, None], which, np.arange(tokens))


def _ranks(scores: NDArray[np.float64]) -> Ids:
    """Return the rank of each score in its row, from 0 for the lowest."""
    return np.argsort(np.argsort(scores, axis=1, kind="stable"), axis=1)
