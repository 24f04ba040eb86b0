"""Images, shards, indexes and streams made to run code, or to train on damaged data."""

import gzip
import os
import re
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.hostile_files import accepted, header, jpeg, pax, streamed, tar_member, write_tar
from helpers.hostile_pieces import PIECES, WORDS
from helpers.streamed_shards import answering, write_shards
from helpers.tiny_images import encoded, saved, write_tree
from vitpar.data import images as images_module
from vitpar.data.images import BadImage, decode
from vitpar.data.loader import TrainLoader
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards.index import Labels, index
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.shards.verify import verify
from vitpar.data.stream import urls
from vitpar.data.stream.stream_set import StreamSet
from vitpar.data.transforms.sample import TrainTransform
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
    "negative size": (header("x", tarfile.REGTYPE, -1024), "size of a member is wrong"),
    "negative size in pax": (pax(b"size=-1024") + header("x.png", tarfile.REGTYPE, 0), "size of a member is wrong"),
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


def test_extended_attributes_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(pax(b"SCHILY.xattr.user.x=" + b"y" * 9000) + SAMPLE + LABEL + END)
    index(tmp_path)
    assert len(ShardSet.open(tmp_path, "train")) == 1 and not list(verify(tmp_path))
    path = tmp_path / "train-0.tar"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "data follows" in next(iter(verify(tmp_path))).what


@pytest.mark.parametrize("pattern", ["{0..", "{0..1}}"])
def test_braces_that_do_not_close_are_refused(pattern: str) -> None:
    with pytest.raises(DataError, match="has unbalanced or too many braces: write them as in") as refused:
        urls.expand(pattern)
    assert len(str(refused.value)) < 400


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake `gs` first in PATH. It creates the returned file if it ever runs."""
    ran, program = tmp_path / "ran", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    return ran


def test_ghostscript_never_runs(tmp_path: Path, ghostscript: Path) -> None:
    with pytest.raises(BadImage):
        decode(EPS)
    shards = tmp_path / "shards"
    shards.mkdir()
    path = write_tar(shards / "train-0.tar", ("a.jpg", EPS), ("a.cls", b"0"))
    index(shards)
    assert ["image format is unknown" in problem.what for problem in verify(shards)] == [True]
    train = ShardSet.open(shards, "train")
    with pytest.raises(DataError, match="image format is unknown"):
        next(iter(TrainLoader(train, TrainTransform(8), order=SampleOrder(0, 1), batch_size=1, workers=0)))
    with pytest.raises(DataError, match="image format is unknown"):
        streamed(path)
    write_tree(tmp_path / "source")
    (tmp_path / "source" / "train" / "ant" / "0.png").write_bytes(EPS)
    with pytest.raises(DataError, match="is not a supported image type"):
        pack(tmp_path / "source", tmp_path / "packed")
    assert not ghostscript.exists()


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICO", "PPM", "TGA", "PCX", "DDS", "SGI"])
def test_unsupported_formats_are_refused(kind: str) -> None:
    with pytest.raises(BadImage, match="image format is unknown"):
        decode(saved(Image.new("RGB", (16, 16)), kind))


def test_image_claiming_too_many_pixels_is_refused() -> None:
    data = jpeg(16, 16)
    place = data.index(b"\xff\xc0") + 5
    with pytest.raises(BadImage, match="60000 x 60000 pixels, more than 134,217,728"):
        decode(data[:place] + struct.pack(">HH", 60_000, 60_000) + data[place + 4 :])
    png = encoded(0)
    header = png[12:16] + struct.pack(">II", 8000, 8000) + png[24:29]
    with pytest.raises(BadImage, match="8000 x 8000 pixels, more than 44,739,242"):
        decode(png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:])


@pytest.mark.parametrize("fast", [True, False])
def test_large_jpeg_is_decoded_at_half_size(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(images_module, "simplejpeg", None)
    whole = decode(jpeg(101, 61))
    monkeypatch.setattr(images_module, "MAX_DECODED_BYTES", 3 * 100 * 60)
    half = decode(jpeg(101, 61))
    assert whole.shape == (61, 101, 3) and half.shape == (31, 51, 3)
    assert np.abs(half[:, :50].astype(int) - whole[::2, :100:2]).max() <= 4


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


def test_other_formats_in_disguise_are_refused(ghostscript: Path) -> None:
    for data in PIECES["disguise"]:
        with pytest.raises(BadImage, match="image format is unknown"):
            decode(data)
    assert not ghostscript.exists()
