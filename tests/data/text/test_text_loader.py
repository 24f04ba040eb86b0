"""Batches of text: every sequence exactly once, in the order of images, also resumed and in evaluation."""

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.tiny_text import documents
from vitpar.data.randomness import SampleOrder, sample_keys
from vitpar.data.text import text_set
from vitpar.data.text.loader import TextLoader
from vitpar.data.text.pack import pack_text
from vitpar.data.text.text_set import TextSet
from vitpar.errors import DataError
from vitpar.models import IGNORED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("text")
    (place / "corpus.txt").write_text("\n".join(documents(60)))
    pack_text(place / "corpus.txt", place / "packed", 16, documents="line", shard_samples=40, val_fraction=0.2)
    return place / "packed"


@pytest.mark.parametrize("span", [1, 700, 1 << 20])
def test_batches_have_the_sequences_of_the_order(folder, monkeypatch, span):
    """Reading alone, in short spans, and in spans of a complete shard."""
    monkeypatch.setattr(text_set, "_GAP", -1 if span == 1 else 4096)
    monkeypatch.setattr(text_set, "_SPAN", span)
    text = TextSet.open(folder, "train")
    order = SampleOrder(3, len(text), repeats=2)
    seen, drawn, last = list[int](), list[int](), 2 * len(text) // 25 + 2
    for number, batch in enumerate(itertools.islice(TextLoader(text, order=order, batch_size=25), last)):
        epochs, samples, repeats = order.batch(25 * number, 25)
        assert batch.numbers.tolist() == samples.tolist() and batch.samples == 25 * (number + 1)
        assert batch.keys.tolist() == sample_keys(3, epochs, samples, repeats).tolist()
        assert batch.ids.shape == (25, 16) and batch.ids.dtype == batch.lengths.dtype == torch.int64
        for ids, length, sample in zip(batch.ids, batch.lengths, samples.tolist(), strict=True):
            assert ids[:length].tolist() == text.ids(sample).tolist()
            assert (ids[length:] == text.specials.pad).all() and length == text.lengths[sample]
        seen += samples.tolist()
        drawn += batch.keys.tolist()
    assert len(text.files) > 3 and len(set(seen)) > 60 and epochs[-1] > 0
    assert len(set(drawn)) == len(drawn), "the same sequence has other masks in the next epoch"


def test_resumed_and_threaded_batches_are_the_same(folder):
    text = pickle.loads(pickle.dumps(TextSet.open(folder, "train")))
    order = SampleOrder(0, len(text))
    settings = [{"workers": 0}, {"workers": 2}, {"workers": 1, "start": 64}]
    runs = [[*itertools.islice(TextLoader(text, order=order, batch_size=32, **s), 12)] for s in settings]  # type: ignore[arg-type]
    for one, other in [*zip(runs[0], runs[1], strict=True), *zip(runs[0][2:], runs[2][:10], strict=True)]:
        assert one.epoch == other.epoch
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("ids", "lengths", "keys"))
    epoch = torch.cat([batch.numbers for batch in runs[0]])[: len(text)]
    assert sorted(epoch.tolist()) == [*range(len(text))]


def test_evaluation_reads_every_sequence_once_and_pads(folder):
    text = TextSet.open(folder, "val")
    loader = TextLoader(text, batch_size=len(text) - 3)
    batches = [*loader]
    assert len(loader) == len(batches) == 2 and {batch.ids.shape for batch in batches} == {(len(text) - 3, 16)}
    numbers = torch.cat([batch.numbers for batch in batches])
    assert numbers.tolist() == [*range(len(text)), *[IGNORED] * (len(text) - 6)]
    assert torch.cat([batch.lengths for batch in batches]).tolist() == [*text.lengths, *[0] * (len(text) - 6)]
    assert (batches[1].ids[3:] == text.specials.pad).all()
    keys = torch.cat([batch.keys for batch in batches])
    assert len(set(keys.tolist())) == len(keys), "each has its own masks"
    assert torch.equal(keys, torch.cat([batch.keys for batch in TextLoader(text, batch_size=len(text) - 3)]))


def test_ids_outside_the_vocabulary_are_refused(folder, monkeypatch):
    text = TextSet.open(folder, "train")
    largest = max(range(len(text)), key=lambda i: text.ids(i).max())
    monkeypatch.setattr(text, "vocab_size", int(text.ids(largest).max()))
    with pytest.raises(DataError, match=r"of '.*packed': it has an id outside its vocabulary of"):
        text.read_batch(np.arange(len(text)))
    assert len(text.read_batch(np.empty(0, np.int64))[0]) == 0
