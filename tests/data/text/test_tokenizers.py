"""Tokenizers: special tokens, words, texts that forge special tokens, and hostile files."""

import sys

import numpy as np
import pytest

from helpers.tiny_text import documents, write_tokenizer
from vitpar.data.shards.manifest import Specials
from vitpar.data.text.tokenizer import open_tokenizer
from vitpar.errors import DataError


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
