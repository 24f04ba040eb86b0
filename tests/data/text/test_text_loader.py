"""Tokenizers, and batches of text: every sequence exactly once, in the order of images, resumed and in evaluation."""

import itertools
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.tiny_text import documents, write_tokenizer
from vitpar.data.randomness import SampleOrder, sample_keys
from vitpar.data.shards.manifest import Specials
from vitpar.data.text import text_set
from vitpar.data.text.loader import TextLoader
from vitpar.data.text.pack import pack_text
from vitpar.data.text.text_set import TextSet
from vitpar.data.text.tokenizer import open_tokenizer
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


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("bert", Specials(pad=0, unk=1, cls=2, sep=3, mask=4)),
        ("t5", Specials(pad=0, eos=1, unk=2, sentinels=tuple(range(3, 23)))),
        ("gpt", Specials(eos=0)),
    ],
)
def test_special_tokens_are_found_by_their_usual_names(tmp_path, kind, expected):
    write_tokenizer(tmp_path / "tokenizer.json", kind)
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).specials == expected
    assert open_tokenizer(str(tmp_path)).specials == expected, "a folder as transformers saves it"


@pytest.mark.parametrize("kind", ["bytes", "bert", "t5", "gpt"])
def test_texts_come_back_and_cannot_forge_special_tokens(tmp_path, kind):
    name = "bytes"
    if kind != "bytes":
        write_tokenizer(tmp_path / "tokenizer.json", kind)
        name = str(tmp_path / "tokenizer.json")
    tokenizer = open_tokenizer(name)
    texts = [*documents(20, seed=1), "", "[MASK] a <extra_id_0> b </s><|endoftext|>"]
    ids, lengths = tokenizer.encode(texts)
    assert len(lengths) == len(texts) and lengths.sum() == len(ids) and lengths[-2] == 0
    specials = set(tokenizer.specials.all) - {tokenizer.specials.unk}
    assert not specials & set(ids.tolist())
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    back = [tokenizer.decode(part.tolist()) for part in parts]
    assert back[:20] == texts[:20] and (back == texts or kind in ("bert", "t5")), "those two lack some characters"


@pytest.mark.parametrize("kind", ["bert", "t5", "gpt"])
def test_words_are_those_of_the_library(tmp_path, kind):
    library = write_tokenizer(tmp_path / "tokenizer.json", kind)
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    text = " ".join(documents(10, seed=2))
    encoding = library.encode(text, add_special_tokens=False)
    words = tokenizer.words.words(np.array([encoding.ids]))[0]
    assert max(encoding.word_ids) > 20 and len(encoding.ids) > 2 * max(encoding.word_ids)
    assert words.tolist() == encoding.word_ids


def test_words_of_bytes_begin_at_white_space_and_special_tokens_are_words():
    tokenizer = open_tokenizer("bytes")
    ids = np.frombuffer(b"to  be\n\nor ", np.uint8).astype(np.int64)
    assert tokenizer.words.words(ids).tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    mask, sep = tokenizer.specials.mask, tokenizer.specials.sep
    assert tokenizer.words.words(np.array([[97, mask, sep, 98, 98]])).tolist() == [[0, 1, 2, 3, 3]]


def test_settings_of_another_program_are_dropped(tmp_path):
    library = write_tokenizer(tmp_path / "tokenizer.json", "bert")
    library.enable_truncation(3)
    library.enable_padding(length=1000)
    library.save(str(tmp_path / "tokenizer.json"))
    _, lengths = open_tokenizer(str(tmp_path / "tokenizer.json")).encode(["the quick brown fox jumps over"])
    assert 6 <= lengths[0] < 40


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not a tokenizer.json"),
        (b'{"model": 1}', "is not a tokenizer.json"),
        (b"\xff\xfe\xff", "line 1 is not UTF-8"),
        (None, "cannot read the tokenizer '.*No such file.*give `bytes`"),
    ],
)
def test_damaged_tokenizers_are_refused_in_one_sentence(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_tokenizer(str(path))


def test_without_the_package_the_error_names_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="pip install tokenizers"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
