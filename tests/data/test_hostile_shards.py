"""Shards, indexes and streams made to train silently on damaged data."""

import gzip
import hashlib
import json
import os
import re
import subprocess
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.hostile_files import accepted, header, jpeg, pax, streamed, tar_member, write_tar
from helpers.hostile_pieces import PIECES, TAR_MEMBERS, WORDS
from helpers.streamed_shards import answering, write_shards
from helpers.tiny_images import encoded, write_tree
from vitpar.data import (
    Labels,
    ShardSet,
    StreamSet,
    index,
    pack,
    verify,
)
from vitpar.data.images import BadImage, decode
from vitpar.data.sources import open_source
from vitpar.data.stream import urls
from vitpar.errors import DataError


def test_every_flipped_bit_in_an_indexed_image_is_detected(tmp_path: Path) -> None:
    """JPEG decoders accept most damaged files, so the index has checksums."""
    write_tree(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed")
    shards = ShardSet.open(tmp_path / "packed", "train")
    jpegs = [i for i in range(len(shards)) if shards.read(i)[:2] == b"\xff\xd8"]
    path, whole = shards.files[0], shards.files[0].read_bytes()
    draw = np.random.default_rng(0)
    for i in jpegs * 5:
        data = bytearray(shards.read(i))
        place = int(draw.integers(len(data) // 2, len(data) - 2))
        data[place] ^= 1 << int(draw.integers(8))
        path.write_bytes(whole.replace(shards.read(i), bytes(data)))
        os.utime(path, ns=(0, shards._stamps[path][1]))
        with pytest.raises(BadImage, match="its checksum differs from the index"):
            shards.read(i)
        path.write_bytes(whole)
        os.utime(path, ns=(0, shards._stamps[path][1]))


def test_stream_refuses_images_that_fail_strict_decoding(tmp_path: Path) -> None:
    """Streams have no checksums, so the decoder must be strict where Pillow fills in missing data."""
    data = jpeg(64, 64)
    damaged = data[:-40] + b"\xff\xd9"
    assert decode(damaged).shape == (64, 64, 3), "Pillow fills what is missing"
    path = write_tar(tmp_path / "a.tar", ("a.jpg", damaged), ("a.cls", b"7"), ("b.jpg", data), ("b.cls", b"8"))
    with pytest.raises(DataError, match=r"sample 'a' of .*a.tar': it cannot be decoded \(.*premature end"):
        streamed(path)
    assert streamed(path, bad_sample="skip") == [8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: 512 + 20] + b"\1" + data[512 + 21 :], "its checksum differs from the index"),
        (lambda data: b"x" + data[1:], "bad checksum"),
        (lambda data: data[:-1] + b"x", "data follows its end"),
        (lambda data: data.replace(b"1", b"2"), None),
    ],
)
def test_verify_checks_headers_and_labels(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str | None
) -> None:
    images = ("a.png", encoded(0)), ("b.png", encoded(1))
    path = write_tar(tmp_path / "train-0.tar", images[0], ("a.cls", b"1"), images[1], ("b.cls", b"0"))
    index(tmp_path)
    assert not list(verify(tmp_path))
    data = path.read_bytes()
    if message is None:  # change a label instead of bytes
        place = data.index(b"a.cls") + 512
        path.write_bytes(data[:place] + b"0" + data[place + 1 :])
        message = "its members or their labels differ from the index"
    else:
        path.write_bytes(change(data))
    assert any(message in problem.what for problem in verify(tmp_path)), list(verify(tmp_path))


SAMPLE, LABEL = tar_member("a.png", encoded(0)), tar_member("a.cls", b"1")
END = bytes(1024)
TARS = {
    "long name beyond the end": (
        header("x", tarfile.GNUTYPE_LONGNAME, 1 << 32),
        "(it is truncated|a header is invalid)",
    ),
    "negative size": (header("x", tarfile.REGTYPE, -1024), "a member has -1,024 bytes"),
    "negative size in pax": (pax(b"size=-1024") + header("x.png", tarfile.REGTYPE, 0), "size of a member is wrong"),
    "chained long names": (header("x", tarfile.GNUTYPE_LONGNAME, 0) * 3000, "a header is invalid"),
    "sparse": (header("x.png", tarfile.GNUTYPE_SPARSE, 512), "sparse"),
    "two archives": (END + LABEL + END, "data follows its end"),
    "damaged header": (LABEL[:100] + b"9" + LABEL[101:] + END, "bad checksum"),
    "no end": (b"", "it is truncated"),
    "image beyond the end": (header("b.png", tarfile.REGTYPE, 1 << 20), "unexpected end"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", TARS)
def test_hostile_tar_files_are_refused(name: str, tmp_path: Path) -> None:
    hostile, message = TARS[name]
    path = tmp_path / "train-0.tar"
    path.write_bytes(SAMPLE + LABEL + hostile)
    with pytest.raises(DataError, match=f"not a valid tar file .*{message}"):
        index(tmp_path)
    with pytest.raises(DataError, match=f"cannot be read to its end: .*{message}"):
        streamed(path)
    path.write_bytes(SAMPLE + LABEL + END)
    index(tmp_path)
    assert streamed(path) == [1] and len(ShardSet.open(tmp_path, "train")) == 1


@pytest.mark.parametrize("label", ["cls", "json"])
def test_hostile_members_are_read_or_refused(label: str, tmp_path: Path) -> None:
    path = tmp_path / "train-0.tar"
    for member in TAR_MEMBERS:
        path.write_bytes(SAMPLE + LABEL + member + END)
        if accepted(lambda: index(tmp_path, labels=Labels(label), workers=1)):
            shards = ShardSet.open(tmp_path, "train")
            assert all(accepted(shards.read, i) for i in range(len(shards)))
        accepted(lambda: streamed(path, label=label))


def test_extended_attributes_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(pax(b"SCHILY.xattr.user.x=" + b"y" * 9000) + SAMPLE + LABEL + END)
    index(tmp_path)
    assert len(ShardSet.open(tmp_path, "train")) == 1 and not list(verify(tmp_path))
    path = tmp_path / "train-0.tar"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "data follows" in next(iter(verify(tmp_path))).what


@pytest.mark.timeout(30)
def test_compressed_stream_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, "train", [2])
    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress((tmp_path / "train-0.tar").read_bytes() + bytes(1 << 24)))
    monkeypatch.setattr(zlib, "decompressobj", None)
    with pytest.raises(DataError, match="it is compressed; decompress it"):
        streamed(tmp_path / "bomb.tar.gz")


def test_deeply_nested_json_labels_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "train-0.tar", ("a.png", encoded(0)), ("a.json", b"[" * 200_000))
    with pytest.raises(DataError, match="has no field 'label'"):
        index(tmp_path, labels=Labels("json"))
    with pytest.raises(DataError, match="has no field 'label'"):
        streamed(path, label="json")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["train-0.tar", "dataset.json", "train.index.npy", "list.csv", "cifar.tar.gz"])
def test_named_pipes_are_refused_without_waiting(name: str, tmp_path: Path) -> None:
    write_shards(tmp_path, "train", [2])
    index(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    uses: list[Callable[[], Any]] = [lambda: ShardSet.open(tmp_path, "train"), lambda: list(verify(tmp_path))]
    if name == "train-0.tar":
        uses = [*uses, lambda: index(tmp_path), lambda: streamed(tmp_path / name)]
    elif not name.startswith(("dataset", "train")):
        uses = [lambda: open_source(tmp_path / name)]
    for use in uses:
        with pytest.raises(DataError):
            use()


def test_long_numbers_outside_braces_are_accepted() -> None:
    url = f"https://host/x-{{0..1}}.tar?sig={'1' * 64}"
    assert len(urls.expand(url)) == 2


@pytest.mark.parametrize("pattern", ["{" * 3000, "{0..", "{0..1}}", f"{{0..{'9' * 5000}}}"])
def test_braces_that_do_not_close_or_are_too_many_are_refused(pattern: str) -> None:
    with pytest.raises(DataError, match="has unbalanced or too many braces: write them as in") as refused:
        urls.expand(pattern)
    assert len(str(refused.value)) < 400


@pytest.mark.timeout(30)
def test_manifest_with_too_many_classes_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, "train", [2])
    index(tmp_path)
    manifest = json.loads((tmp_path / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({**manifest, "classes": ["x"] * 2_000_000}))
    with pytest.raises(DataError, match=r"damaged or from another version \(classes: List should have at most 1000000"):
        ShardSet.open(tmp_path, "train")


@pytest.mark.parametrize("name", ["a\0.tar", "a\ud800.tar", "x" * 5000])
def test_impossible_file_names_are_refused(tmp_path: Path, name: str) -> None:
    write_shards(tmp_path, "train", [2])
    index(tmp_path)
    text = (tmp_path / "dataset.json").read_text()
    (tmp_path / "dataset.json").write_text(text.replace('"train-0.tar"', json.dumps(name)))
    with pytest.raises(DataError) as refused:
        ShardSet.open(tmp_path, "train")
    assert len(str(refused.value)) < 700


def test_index_must_have_the_rows_of_the_manifest(tmp_path: Path) -> None:
    write_shards(tmp_path, "train", [2, 3])
    index(tmp_path)
    for samples in (1, 4):  # wrong count for the second shard
        manifest = json.loads((tmp_path / "dataset.json").read_text())
        manifest["splits"]["train"]["shards"][1]["samples"] = samples
        (tmp_path / "dataset.json").write_text(json.dumps(manifest))
        with pytest.raises(DataError, match=r"does not match dataset.json"):
            ShardSet.open(tmp_path, "train")


def test_index_claiming_many_rows_allocates_nothing(tmp_path: Path) -> None:
    write_shards(tmp_path, "train", [2])
    index(tmp_path)
    path = tmp_path / "train.index.npy"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"(2,)", b"(9999999999999,)").replace(b" " * 12 + b"\n", b"\n"))
    with pytest.raises(DataError, match=r"does not match dataset.json"):
        ShardSet.open(tmp_path, "train")
    path.write_bytes(whole.replace(b"False", b"f(x)*"))
    with pytest.raises(DataError, match=r"does not match dataset.json"):
        ShardSet.open(tmp_path, "train")


def test_hostile_headers_of_an_index_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, "train", [2])
    index(tmp_path)
    path = tmp_path / "train.index.npy"
    rows, manifest = path.read_bytes()[128:], json.loads((tmp_path / "dataset.json").read_text())
    for header_bytes in PIECES["npy"]:
        path.write_bytes(header_bytes + rows)
        manifest["splits"]["train"]["index_sha256"] = hashlib.sha256(header_bytes + rows).hexdigest()
        (tmp_path / "dataset.json").write_text(json.dumps(manifest))
        assert not accepted(ShardSet.open, tmp_path, "train"), header_bytes[:200]


# web servers

ANSWERS = WORDS["http"]["answers"]
"""Answers to a request: "STATUS | HEADER | … || BODY", or bytes if there is no "||"."""


def test_answers_of_hostile_servers_are_read_completely_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urls, "_SILENT_S", 1.0)
    write_shards(tmp_path, "train", [2])
    shard = (tmp_path / "train-0.tar").read_bytes()
    parts = {"shard": shard, "begin": shard[:700], "n": b"%d" % len(shard), "hex": b"%x" % len(shard)}
    parts |= {"gzip": gzip.compress(shard), "file": b"file://%s" % bytes(tmp_path / "train-0.tar")}
    for text in ANSWERS:
        head, bar, body = text.removeprefix("? ").partition(" || ")
        if bar:
            head = "\r\n".join(["HTTP/1.1 " + head.replace(" | ", "\r\n"), "Connection: close", "", body])
        words = re.split(r"\{([a-z]+)\}", head)
        content = b"".join(parts[word] if n % 2 else word.encode("latin-1") for n, word in enumerate(words))
        found: list[int] = []
        with answering(content) as address:
            is_read = accepted(lambda url, into: into.extend(streamed(url)), f"{address}/x.tar", found)
        assert not is_read or text.startswith("?") or found == [0, 1], text


def test_hostile_urls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_SILENT_S", 1.0)
    for url in (*WORDS["url"]["urls"], "http://127.0.0.1:1/\udc80.tar"):
        assert not accepted(lambda url=url: streamed(*urls.expand(url))), url


def test_hostile_braces_are_expanded_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a command was run"))
    shards = [place + name for place in WORDS["url"]["places"] for name in ("x.tar", "sh")]
    for shard in (*shards, *(f"https://host/{braces}.tar" for braces in WORDS["url"]["braces"])):
        accepted(lambda shard=shard: StreamSet(urls.expand(shard), 1, 1, Labels()))
