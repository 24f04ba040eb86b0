"""Packing of text: all of it comes back, in reproducible shards, from every kind of source and after interruptions."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.tiny_images import write_classes
from helpers.tiny_text import documents, write_tokenizer
from vitpar.data.shards.index import index
from vitpar.data.shards.manifest import MANIFEST, read_manifest
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.shards.verify import verify
from vitpar.data.survey import survey
from vitpar.data.text import pack as text_pack
from vitpar.data.text import sources
from vitpar.data.text.pack import pack_text
from vitpar.data.text.sources import open_text
from vitpar.data.text.text_set import TextSet
from vitpar.errors import DataError
from vitpar_cli.data import app

TEXTS = documents(30)


def sequences(folder: Path, split: str) -> list[bytes]:
    """Return the bytes of all sequences of a split that was packed with the tokenizer of bytes."""
    text = TextSet.open(folder, split)
    return [bytes(text.ids(i).tolist()) for i in range(len(text))]


def cut(texts: list[str], tokens: int) -> list[bytes]:
    """Return the documents' bytes in pieces of at most `tokens`."""
    whole = [text.encode() for text in texts]
    return [data[start : start + tokens] for data in whole for start in range(0, len(data), tokens)]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_corpus(folder: Path, kind: str, texts: list[str]) -> Path:
    """Write a source of the kind `kind` and return its path."""
    lines = "".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts))
    if kind == "folder":
        (folder / "corpus").mkdir()
        for i, text in enumerate(texts):
            (folder / "corpus" / f"{i:03d}.txt").write_text(text)
        return folder / "corpus"
    path = folder / f"corpus.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"n": range(len(texts)), "text": texts}), path, row_group_size=7)
    elif kind == "jsonl.gz":
        half = len(lines) // 2  # two members, as of `cat a.gz b.gz`
        path.write_bytes(gzip.compress(lines[:half].encode()) + gzip.compress(lines[half:].encode()))
    else:
        path.write_text({"jsonl": lines, "txt": "\n\n \n".join(texts) + "\n"}[kind])
    return path


@pytest.mark.parametrize("kind", ["txt", "folder", "jsonl", "jsonl.gz", "parquet"])
def test_every_document_is_packed_exactly_once(tmp_path, kind):
    source = write_corpus(tmp_path, kind, TEXTS)
    options = {"documents": "paragraph"} if kind == "txt" else {}
    manifest = pack_text(source, tmp_path / "packed", 16, shard_samples=20, **options)
    train, val = (sequences(tmp_path / "packed", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(cut(TEXTS, 16)) and train != sorted(train)
    assert manifest.text is not None and manifest.text.documents == {"train": 28, "val": 2}
    assert sum(manifest.text.ids.values()) == sum(len(text.encode()) for text in TEXTS)
    assert len(manifest.splits["train"].shards) == -(-len(train) // 20) and not list(verify(tmp_path / "packed"))
    whole = [text for text in TEXTS if set(cut([text], 16)) <= set(val)]
    assert sorted(cut(whole, 16)) == sorted(val), "complete documents"


def test_lines_and_files_are_documents(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"to be\n\nor not\r\nto be")
    pack_text(path, tmp_path / "lines", 64, documents="line", val_fraction=0)
    assert sorted(sequences(tmp_path / "lines", "train")) == [b"or not", b"to be", b"to be"]
    pack_text(path, tmp_path / "file", 8, val_fraction=0.3)
    assert sequences(tmp_path / "file", "val") == [b"o be"], "the last sequence of a single document"
    assert sorted(sequences(tmp_path / "file", "train")) == [b"r not\r\nt", b"to be\n\no"]


def test_ends_of_lines_are_kept_and_blank_lines_of_any_length_separate(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_PIECE", 16)
    path = tmp_path / "corpus.txt"

    def found(text: str, documents: Any) -> list[str]:
        path.write_bytes(text.encode())
        joined = "".join(piece.text + "|" * piece.last for piece in open_text(path, documents).pieces("train"))
        return [document for document in joined.split("|") if document]

    dos, blank = "a\r\nb\rc\r\n\r\nd\r\n", " " * 50
    assert found(dos, "file") == [dos] and found(dos, "line") == ["a", "b\rc", "d"]
    assert found(dos, "paragraph") == ["a\r\nb\rc", "d"]
    for kind in ("paragraph", "line"):
        assert found(f"a\n{blank}\nb\n{blank}", kind) == ["a", "b"]
    assert found(f"a{blank}b{blank}\nc", "line") == [f"a{blank}b{blank}", "c"]
    assert found(f"{blank}\n{blank}", "file") == [] and found(f"{blank}a", "file") == [f"{blank}a"]


@pytest.mark.parametrize("kind", ["bytes", "bert"])
def test_sequences_may_continue_over_documents(tmp_path, kind):
    source, tokenizer = write_corpus(tmp_path, "jsonl", TEXTS), "bytes"
    if kind == "bert":
        write_tokenizer(tmp_path / "tokenizer.json", kind)
        tokenizer = str(tmp_path / "tokenizer.json")
    pack_text(source, tmp_path / "p", 16, tokenizer=tokenizer, cross_documents=True, val_fraction=0.1)
    joined: dict[str, list[int]] = {}
    for split in ("train", "val"):
        text = TextSet.open(tmp_path / "p", split)
        assert (text.lengths == 16).sum() >= len(text) - 1, "all but the last are full"
        end = text.specials.end
        joined[split] = [i for n in range(len(text)) for i in text.ids(n).tolist()]
        assert joined[split].count(end) == text.documents - 1
    decoded = text.tokenizer.decode
    places = [i for i, token in enumerate(joined["val"]) if token == end]
    parts = np.split(np.array(joined["val"]), places)
    found = [decoded([i for i in part.tolist() if i != end]) for part in parts]
    assert found == [text for text in TEXTS if text in found] and len(found) == 3
    assert read_manifest(tmp_path / "p").text.tokenizer == ("bytes" if kind == "bytes" else "file")  # type: ignore[union-attr]


def test_long_documents_are_tokenised_in_pieces_that_end_with_lines(tmp_path, monkeypatch):
    text = "".join(f"{line} " * (i % 9) + line + "\n" for i, line in enumerate(TEXTS))
    whole = write_tokenizer(tmp_path / "tokenizer.json", "gpt").encode(text).ids
    (tmp_path / "corpus.txt").write_text(text)
    monkeypatch.setattr(sources, "_PIECE", 200)
    monkeypatch.setattr(text_pack, "_TEXTS", 3)
    assert len([*open_text(tmp_path / "corpus.txt").pieces("train")]) > 20
    options: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer.json"), "val_fraction": 0}
    pack_text(tmp_path / "corpus.txt", tmp_path / "packed", 1 << 20, **options)
    assert TextSet.open(tmp_path / "packed", "train").ids(0).tolist() == whole


def test_splits_are_those_of_names(tmp_path):
    for name, text in (("train-0", "one"), ("train-1", "two"), ("validation", "three"), ("test", "four")):
        (tmp_path / f"{name}.txt").write_text(text)
    pack_text(tmp_path, tmp_path / "packed", 8)
    assert {split: sorted(sequences(tmp_path / "packed", split)) for split in ("train", "val", "test")} == {
        "train": [b"one", b"two"],
        "val": [b"three"],
        "test": [b"four"],
    }


@pytest.mark.parametrize(
    ("work", "time"), [("train: kB of text", 2), ("train: kB of text", 5), ("train", 3), ("val", 1)]
)
def test_interrupted_packing_continues_to_the_same_bytes(tmp_path, monkeypatch, work, time):
    """Documents take several pieces, so some interruptions are within one."""
    monkeypatch.setattr(sources, "_PIECE", 50)
    monkeypatch.setattr(text_pack, "_TEXTS", 4)
    source = write_corpus(tmp_path, "jsonl", TEXTS)
    calls = []

    def interrupt(description: str, done: int, total: int) -> None:
        calls.append(description)
        if description == work and calls.count(work) == time:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"tokens": 16, "shard_samples": 20, "cross_documents": True}
    with pytest.raises(KeyboardInterrupt):
        pack_text(source, tmp_path / "packed", progress=interrupt, **settings)
    assert not (tmp_path / "packed").exists()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".packed.packing").glob("*.tokens")}
    seen = []
    cut_up = sources._cut
    monkeypatch.setattr(sources, "_cut", lambda *a: (seen.append(1), cut_up(*a))[1])
    pack_text(source, tmp_path / "packed", **settings)
    pack_text(source, tmp_path / "expected", **settings)
    assert files(tmp_path / "packed") == files(tmp_path / "expected")
    assert {name: (tmp_path / "packed" / name).stat().st_mtime_ns for name in before} == before
    assert bool(before) == (work != "train: kB of text") and (len(seen) == 30) == bool(before)
    pack_text(source, tmp_path / "other", seed=1, **settings)
    assert files(tmp_path / "other")["train-000000.tokens"] != files(tmp_path / "packed")["train-000000.tokens"]


def test_token_files_hold_the_ids_and_nothing_else(tmp_path):
    pack_text(write_corpus(tmp_path, "jsonl", TEXTS), tmp_path / "packed", 16, val_fraction=0, shard_samples=20)
    stored = [np.fromfile(path, "<u2") for path in sorted((tmp_path / "packed").glob("*.tokens"))]
    assert len(stored) > 1 and np.concatenate(stored).tolist() == list(
        b"".join(sequences(tmp_path / "packed", "train"))
    )


def test_large_vocabularies_are_stored_in_32_bits(tmp_path):
    library = write_tokenizer(tmp_path / "tokenizer.json", "gpt")
    content = json.loads(library.to_str())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 70_000, "content": "<far>", "special": False})
    content["model"]["vocab"]["<far>"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "corpus.txt").write_text("the quick <far> fox")
    pack_text(tmp_path / "corpus.txt", tmp_path / "p", 64, tokenizer=str(tmp_path / "tokenizer.json"), val_fraction=0)
    text = TextSet.open(tmp_path / "p", "train")
    assert text.text.dtype == "uint32" and 70_000 in text.ids(0) and text.decode(0) == "the quick <far> fox"
    (tmp_path / "p" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not the tokenizer that the data set was packed with"):
        survey(tmp_path / "p")


def test_damage_is_found_by_verify_and_named_on_reading(tmp_path):
    pack_text(write_corpus(tmp_path, "jsonl", TEXTS), tmp_path / "packed", 16, val_fraction=0)
    text = TextSet.open(tmp_path / "packed", "train")
    path, whole = text.files[0], bytearray(text.files[0].read_bytes())
    stamp = path.stat()
    whole[int(text._offset[5]) + 2] ^= 1
    path.write_bytes(whole)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    (problem,) = verify(tmp_path / "packed")
    assert (problem.sample, problem.name) == (5, "train-000000.tokens/sequence 5")
    with pytest.raises(DataError, match=r"sample 'train-000000.tokens/sequence 5' of .*its checksum differs"):
        text.read_batch(np.arange(10))


def test_text_and_images_are_told_apart_in_one_sentence(tmp_path):
    write_classes(tmp_path / "images", 6)
    pack(tmp_path / "images", tmp_path / "pictures")
    pack_text(write_corpus(tmp_path, "jsonl", TEXTS), tmp_path / "text", 16)
    with pytest.raises(DataError, match=r"holds images, but text is needed: pack text with .* --tokens N"):
        TextSet.open(tmp_path / "pictures", "train")
    with pytest.raises(DataError, match="holds text, but images are needed"):
        ShardSet.open(tmp_path / "text", "train")
    with pytest.raises(DataError, match="holds text, which cannot be indexed again"):
        index(tmp_path / "text")
    assert "text" not in json.loads((tmp_path / "pictures" / MANIFEST).read_text()), "older versions read it"
    manifest = tmp_path / "text" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"vocab_size": 362', '"vocab_size": 361'))
    with pytest.raises(DataError, match="a special token is outside the vocabulary of 361"):
        TextSet.open(tmp_path / "text", "train")


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", b"a\n" * 9000 + b"na\xefve", {}, r"a.txt': line 9001 is not UTF-8 .byte 0xef.: save it as UTF-8"),
        ("a.txt", "a\nb".encode("utf-16"), {}, "a.txt': line 1 has NUL characters"),
        ("a.txt", "a\nb".encode("utf-16-le"), {}, "a.txt': line 1 has NUL characters, as UTF-16 has: save it as UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe4"}', {}, "a.jsonl': line 2 is not UTF-8 .byte 0xe4.: save"),
        ("a.txt", b" \n", {"documents": "line"}, "has no text for the split 'train'"),
        ("a.jpg", b"x", {}, "is no text: use .txt"),
        ("a.jsonl", b'{"text": 1}', {}, "line 1 of .* has no text in a field 'text' .text.: name another"),
        ("a.jsonl", b'{"text": "a"}\n[1]', {}, "line 2 of .* has no text in a field"),
        ("a.jsonl", b'{"text": "a"', {}, "line 1 of .* is not a JSON object"),
        ("a.jsonl", b"{}", {"documents": "line"}, "--documents line is for .txt files"),
        # Without the time, since these bytes name the case, and processes that share the tests must agree on names.
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0)[:-4], {}, "cannot read .*fetch it again"),
        ("a.parquet", b"PAR1xxxxPAR1", {}, "cannot be read as Parquet"),
        ("a.txt", b"a", {"field": "x"}, "--field x is for JSON lines"),
        ("a.txt", b"a", {}, "makes too few sequences of 8 tokens .1. for a val split"),
        ("a.txt", b"a", {"tokens": 0}, "sequences of 0 tokens are out of range"),
        ("a.txt", b"a", {"val_fraction": 1.5}, "val fraction 1.5 is out of range"),
    ],
)
def test_bad_sources_are_refused_in_one_sentence(tmp_path, name, content, options, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        pack_text(tmp_path / name, tmp_path / "packed", **{"tokens": 8} | options)
    assert not (tmp_path / "packed").exists()


def test_options_of_images_and_text_are_refused_by_name(tmp_path, refused):
    (tmp_path / "corpus.txt").write_text("to be or not to be\n" * 50)
    pack = ("data", "pack", "corpus.txt", "packed")
    rows = [
        (("--tokens", "8", "--short-side", "9"), "--short-side is for images"),
        (("--tokens", "8", "--no-decode"), "--no-decode is for images"),
        (("--tokens", "8", "--workers", "2"), "--workers is for images"),
        (("--tokenizer", "bytes"), "--tokenizer is for text: add --tokens N"),
        (("--cross-documents",), "--cross-documents is for text"),
    ]
    refused(tmp_path, rows, *pack)


def test_commands_pack_describe_and_verify_text(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("".join(f"{text}\n\n" for text in TEXTS))
    start = ["pack", "corpus.txt", "packed", "--tokens", "16", "--documents", "paragraph"]

    def output(*words: str) -> str:
        result = CliRunner().invoke(app, words)
        assert not result.exception, result.output
        return result.output

    assert "train: 1 file" in output(*start, "--dry-run") and not (tmp_path / "packed").exists()
    output(*start)
    found = json.loads(output("info", "packed", "--json"))
    assert found["splits"]["train"]["documents"] == 28 and found["tokenizer"] == "bytes"
    assert found["splits"]["val"]["decoded"][0][:8] in "\n".join(TEXTS)
    assert "sequences of at most 16 tokens" in output("info", "packed") and "100 sentinels" in output("info", "packed")
    assert "is complete" in output("verify", "packed")
