"""Files of images that were made to run code, to take memory or time without end, or to train on damage silently."""

import gzip
import io
import json
import os
import pickle
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from PIL import Image

from helpers.streamed_shards import write_shards
from helpers.tfrecord_files import write_tfrecords
from helpers.tiny_images import encoded, write_tree, write_zips
from vitpar.data import (
    EvalTransform,
    Labels,
    Order,
    ShardSet,
    StreamEvalLoader,
    StreamSet,
    TrainLoader,
    TrainTransform,
    index,
    pack,
    verify,
)
from vitpar.data import images as images_module
from vitpar.data.images import BadImage, decode
from vitpar.data.sources import open_source
from vitpar.data.stream import urls
from vitpar.errors import DataError
from vitpar.limits import MAX_TAR_EXTENDED_BYTES, MAX_TAR_PADDING_BYTES

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
EVAL = EvalTransform(8)


def write_tar(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def streamed(*paths: Path, label: str = "cls", bad_sample: str = "fail") -> list[int]:
    """The labels of the samples that a stream gives."""
    data = StreamSet(tuple(map(str, paths)), 1, 1000, Labels.parse(label))
    found: list[int] = []
    loader = StreamEvalLoader(data, EVAL, batch_size=4, workers=0, bad_sample=bad_sample)  # type: ignore[arg-type]
    for batch in loader:
        if batch.ended:
            return found
        found += [int(label) for label in batch.labels if label >= 0]
    raise AssertionError


# Images.


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `gs` first in PATH that leaves this file when it runs."""
    ran, program = tmp_path / "ran", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    return ran


def test_ghostscript_never_starts(tmp_path: Path, ghostscript: Path) -> None:
    with pytest.raises(BadImage):
        decode(EPS)
    shards = tmp_path / "shards"
    shards.mkdir()
    path = write_tar(shards / "train-0.tar", ("a.jpg", EPS), ("a.cls", b"0"))
    index(shards)
    assert ["known image format" in problem.what for problem in verify(shards)] == [True]
    train = ShardSet.open(shards, "train")
    with pytest.raises(DataError, match="known image format"):
        next(iter(TrainLoader(train, TrainTransform(8), order=Order(0, 1), batch_size=1, workers=0)))
    with pytest.raises(DataError, match="known image format"):
        streamed(path)
    write_tree(tmp_path / "source")
    (tmp_path / "source" / "train" / "ant" / "0.png").write_bytes(EPS)
    with pytest.raises(DataError, match="is not an image of a known type"):
        pack(tmp_path / "source", tmp_path / "packed")
    assert not ghostscript.exists()


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICO", "PPM", "TGA", "PCX", "DDS", "SGI"])
def test_other_formats_are_refused(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, kind)
    with pytest.raises(BadImage, match="known image format"):
        decode(file.getvalue())


def jpeg(width: int, height: int) -> bytes:
    file = io.BytesIO()
    gradient = np.linspace(0, 255, width, dtype=np.uint8)
    Image.fromarray(np.stack([np.tile(gradient, (height, 1))] * 3, -1)).save(file, "JPEG", quality=95)
    return file.getvalue()


def test_an_image_that_claims_many_pixels_is_refused() -> None:
    data = jpeg(16, 16)
    place = data.index(b"\xff\xc0") + 5
    with pytest.raises(BadImage, match="60000 x 60000 pixels, more than 134,217,728"):
        decode(data[:place] + struct.pack(">HH", 60_000, 60_000) + data[place + 4 :])
    png = encoded(0)
    header = png[12:16] + struct.pack(">II", 8000, 8000) + png[24:29]
    with pytest.raises(BadImage, match="8000 x 8000 pixels, more than 44,739,242"):
        decode(png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:])


@pytest.mark.parametrize("fast", [True, False])
def test_a_large_jpeg_is_decoded_at_half_its_size(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(images_module, "simplejpeg", None)
    whole = decode(jpeg(101, 61))
    monkeypatch.setattr(images_module, "MAX_DECODED_BYTES", 3 * 100 * 60)
    half = decode(jpeg(101, 61))
    assert whole.shape == (61, 101, 3) and half.shape == (31, 51, 3)
    assert np.abs(half[:, :50].astype(int) - whole[::2, :100:2]).max() <= 4


def test_a_long_thin_image_is_not_blown_up(monkeypatch: pytest.MonkeyPatch) -> None:
    thin = np.random.default_rng(0).integers(0, 256, (1, 65_000, 3), np.uint8)
    sizes: list[tuple[int, int]] = []
    module = sys.modules["vitpar.data.transforms.evaluate"]
    real = module.resize
    monkeypatch.setattr(module, "resize", lambda image, h, w, i: sizes.append((h, w)) or real(image, h, w, i))
    monkeypatch.setattr(module, "MAX_DECODED_BYTES", 3 * 9 * 576)
    EVAL(thin)
    EVAL(thin.transpose(1, 0, 2))
    EVAL(thin[:, :50])
    assert sizes == [(9, 576), (576, 9), (9, 450)]


def test_a_jpeg_of_many_scans_is_refused() -> None:
    file = io.BytesIO()
    Image.fromarray(decode(jpeg(64, 64))).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    assert decode(data).shape == (64, 64, 3)
    last = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(BadImage, match="more than 100 scans"):
        decode(data[:-2] + 100 * last + data[-2:])
    film = np.random.default_rng(0).integers(0, 256, 12 << 20, np.uint8).tobytes()  # as phones put behind an image
    assert film.count(b"\xff\xda") > 100 and decode(data + film).shape == (64, 64, 3)


# Damage.


def test_every_flipped_bit_of_an_indexed_image_is_found(tmp_path: Path) -> None:
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
        with pytest.raises(BadImage, match="its bytes are not those that were indexed"):
            shards.read(i)
        path.write_bytes(whole)
        os.utime(path, ns=(0, shards._stamps[path][1]))


def test_a_stream_refuses_what_strict_decoding_finds(tmp_path: Path) -> None:
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
        (lambda data: data[: 512 + 20] + b"\1" + data[512 + 21 :], "its bytes are not those that were indexed"),
        (lambda data: b"x" + data[1:], "bad checksum"),
        (lambda data: data[:-1] + b"x", "something follows its end"),
        (lambda data: data.replace(b"1", b"2"), None),
    ],
)
def test_verify_looks_at_headers_and_labels(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str | None
) -> None:
    path = write_tar(tmp_path / "train-0.tar", ("a.png", encoded(0)), ("a.cls", b"1"), ("b.png", encoded(1)))
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("b.cls")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"0"))
    index(tmp_path)
    assert not list(verify(tmp_path))
    data = path.read_bytes()
    if message is None:  # another label
        place = data.index(b"a.cls") + 512
        path.write_bytes(data[:place] + b"0" + data[place + 1 :])
        message = "its members or their labels are not those of the index"
    else:
        path.write_bytes(change(data))
    assert any(message in problem.what for problem in verify(tmp_path)), list(verify(tmp_path))


# Tar files.


def header(name: str, kind: bytes, size: int) -> bytes:
    """A header of 512 bytes that claims `size`, also where that is negative."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = (size % (1 << 96)).to_bytes(12, "big") if size < 0 or size >= 1 << 33 else b"%011o\0" % size
    block[124] |= 0x80 * (size < 0 or size >= 1 << 33)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(**fields: str) -> bytes:
    records = b""
    for name, value in fields.items():
        line = f" {name}={value}\n".encode()
        length = len(line) + len(str(len(line) + 4))
        records += str(length).encode() + line
    return header("pax", tarfile.XHDTYPE, len(records)) + records + bytes(-len(records) % 512)


SAMPLE = header("a.png", tarfile.REGTYPE, len(encoded(0))) + encoded(0) + bytes(-len(encoded(0)) % 512)
LABEL = header("a.cls", tarfile.REGTYPE, 1) + b"1".ljust(512, b"\0")
END = bytes(1024)
TARS = {
    "long name of 2 GB": (header("x", tarfile.GNUTYPE_LONGNAME, 1 << 31), "a name has 2,147,483,648 bytes"),
    "extended header of 1 GB": (header("x", tarfile.XHDTYPE, 1 << 30), "extended header has"),
    "global header": (header("x", tarfile.XGLTYPE, MAX_TAR_EXTENDED_BYTES + 1), "extended header has"),
    "negative size": (header("x", tarfile.REGTYPE, -1024), "a member has -1,024 bytes"),
    "negative size in pax": (pax(size="-1024") + header("x.png", tarfile.REGTYPE, 0), "size of a member is wrong"),
    "chained long names": (header("x", tarfile.GNUTYPE_LONGNAME, 0) * 3000, "makes no sense"),
    "sparse": (header("x.png", tarfile.GNUTYPE_SPARSE, 512), "sparse"),
    "two archives": (END + LABEL + END, "something follows its end"),
    "zeros without end": (END + bytes(2 * MAX_TAR_PADDING_BYTES), "zeros follow its end"),
    "damaged header": (LABEL[:100] + b"9" + LABEL[101:] + END, "bad checksum"),
    "no end": (b"", "it ends too early"),
    "image beyond the end": (header("b.png", tarfile.REGTYPE, 1 << 20), "unexpected end"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", TARS)
def test_hostile_tar_files_are_refused(name: str, tmp_path: Path) -> None:
    hostile, message = TARS[name]
    path = tmp_path / "train-0.tar"
    path.write_bytes(SAMPLE + LABEL + hostile)
    with pytest.raises(DataError, match=f"not a whole tar file .*{message}"):
        index(tmp_path)
    with pytest.raises(DataError, match=f"cannot be read to its end: .*{message}"):
        streamed(path)
    path.write_bytes(SAMPLE + LABEL + END)
    index(tmp_path)
    assert streamed(path) == [1] and len(ShardSet.open(tmp_path, "train")) == 1


def test_extended_attributes_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(pax(**{"SCHILY.xattr.user.x": "y" * 9000}) + SAMPLE + LABEL + END)
    index(tmp_path)
    assert len(ShardSet.open(tmp_path, "train")) == 1 and not list(verify(tmp_path))
    manifest = json.loads((tmp_path / "dataset.json").read_text())
    for labels in ("cls", None):  # None: of an older version
        (tmp_path / "dataset.json").write_text(json.dumps({**manifest, "labels": labels}))
        assert not list(verify(tmp_path))
    path = tmp_path / "train-0.tar"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "something follows" in next(iter(verify(tmp_path))).what


@pytest.mark.timeout(30)
def test_a_compressed_stream_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, "train", [2])
    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress((tmp_path / "train-0.tar").read_bytes() + bytes(1 << 24)))
    monkeypatch.setattr(zlib, "decompressobj", None)
    with pytest.raises(DataError, match="it is compressed; unpack it"):
        streamed(tmp_path / "bomb.tar.gz")


def test_labels_nested_without_end_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "train-0.tar", ("a.png", encoded(0)), ("a.json", b"[" * 200_000))
    with pytest.raises(DataError, match="has no field 'label'"):
        index(tmp_path, labels=Labels("json"))
    with pytest.raises(DataError, match="has no field 'label'"):
        streamed(path, label="json")


# What is no regular file.


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["train-0.tar", "dataset.json", "train.index.npy", "list.csv", "cifar.tar.gz"])
def test_pipes_are_not_waited_for(name: str, tmp_path: Path) -> None:
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


@pytest.mark.timeout(30)
def test_rings_of_links_end(tmp_path: Path) -> None:
    labels = write_tree(tmp_path / "source")
    for name in ("up", "again"):
        (tmp_path / "source" / "train" / "ant" / name).symlink_to("..", target_is_directory=True)
    source = open_source(tmp_path / "source")
    assert sum(len(split.labels) for split in source.splits.values()) >= len(labels)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "train").symlink_to("train")
    with pytest.raises(DataError, match=r"cannot read .*Too many levels"):
        open_source(tmp_path / "self")


# What claims to be large.


@pytest.mark.timeout(30)
@pytest.mark.parametrize("pattern", ["{a,b}" * 28, "{0..99999999999}", "{a..z}" * 9, "{x," + "{a,b}" * 28 + "}"])
def test_braces_are_counted_before_they_are_expanded(pattern: str) -> None:
    with pytest.raises(DataError, match="stands for more than 500,000 shards"):
        urls.expand(f"https://host/{pattern}.tar")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{" * 100 + "}" * 100, "braces within braces 17 deep"),
        ("{0.." + "9" * 5000 + "}", "a range to a number of over 18 digits"),
        ("x" * 1_000_000, "has 1,000,000 characters"),
    ],
)
def test_strange_patterns_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        urls.expand(pattern)
    assert len(str(refused.value)) < 400


def test_numbers_outside_braces_may_be_long() -> None:
    url = f"https://host/x-{{0..1}}.tar?sig={'1' * 64}"
    assert len(urls.expand(url)) == 2


@pytest.mark.parametrize(
    "pattern", ["a{0..9}b{x,y}", "{1,{2,3}{4,5}}", "{00..12..5}", "{a..e..2}", "{9..1}", "x{}y{z}"]
)
def test_counted_braces_are_those_that_are_expanded(pattern: str) -> None:
    counted, expanded = urls._expansions(pattern), len(urls.expand(pattern))
    assert counted == expanded or ("a..e" in pattern and counted > expanded)


@pytest.mark.timeout(30)
def test_a_manifest_of_too_many_classes_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, "train", [2])
    index(tmp_path)
    manifest = json.loads((tmp_path / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({**manifest, "classes": ["x"] * 3_000_000}))
    with pytest.raises(DataError, match=r"damaged or of another version \(classes: List should have at most 1000000"):
        ShardSet.open(tmp_path, "train")


@pytest.mark.parametrize("name", ["a\0.tar", "a\ud800.tar", "x" * 5000])
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, name: str) -> None:
    write_shards(tmp_path, "train", [2])
    index(tmp_path)
    text = (tmp_path / "dataset.json").read_text()
    (tmp_path / "dataset.json").write_text(text.replace('"train-0.tar"', json.dumps(name)))
    with pytest.raises(DataError) as refused:
        ShardSet.open(tmp_path, "train")
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize("name", ["a\0.png", "x" * 5000])
def test_names_in_lists_are_refused_where_no_file_can_have_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "list.csv").write_text(f"path,label,split\n{name},1,train\n{name},0,val\n")
    with pytest.raises(DataError) as refused:
        open_source(tmp_path / "list.csv").splits["train"].read(0)
    assert len(str(refused.value)) < 700


def test_an_index_that_claims_many_rows_takes_no_memory(tmp_path: Path) -> None:
    write_shards(tmp_path, "train", [2])
    index(tmp_path)
    path = tmp_path / "train.index.npy"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"(2,)", b"(9999999999999,)").replace(b" " * 12 + b"\n", b"\n"))
    with pytest.raises(DataError, match=r"does not fit dataset.json"):
        ShardSet.open(tmp_path, "train")
    path.write_bytes(whole.replace(b"False", b"f(x)*"))
    with pytest.raises(DataError, match=r"does not fit dataset.json"):
        ShardSet.open(tmp_path, "train")


def test_zip_entries_give_what_they_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zips(tmp_path / "source")
    path = tmp_path / "source" / "train.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(6):
            archive.writestr(f"{('ant', 'bee', 'cat')[i % 3]}/{i}.png", bytes(64 << 20) if i == 0 else encoded(i))
    data = path.read_bytes()
    small = data.replace(struct.pack("<I", 64 << 20), struct.pack("<I", 1000))
    asked: list[int] = []
    real = zipfile.ZipExtFile.read
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda self, n=-1: (asked.append(n), real(self, n))[1])
    path.write_bytes(small)
    with pytest.raises(DataError, match=r"cannot read entry 'ant/0.png' of .*: (Bad CRC|Overlapped)"):
        open_source(tmp_path / "source").splits["train"].read(0)
    assert asked and 0 < max(asked) <= 1 << 20
    path.write_bytes(data.replace(struct.pack("<I", 64 << 20), struct.pack("<I", 3 << 30)))
    with pytest.raises(DataError, match="has 3,221,225,472 bytes: an image can have"):
        open_source(tmp_path / "source").splits["train"].read(0)


def test_parquet_files_that_grow_in_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = pa.array([{"bytes": b"x" * (1 << 20)}] * 64, pa.struct({"bytes": pa.binary()}))
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"image": image, "label": ["y" * (1 << 20)] * 64}), path)
    with pytest.raises(DataError, match="it needs `image`, with bytes, and `label`, of whole numbers"):
        open_source(tmp_path)
    parquet.write_table(pa.table({"image": image, "label": [i % 2 for i in range(64)]}), path)
    assert path.stat().st_size < 1 << 20, "the image is in the file once"
    split = open_source(tmp_path).splits["train"]
    assert len(split.read(0)) == 1 << 20
    monkeypatch.setattr(sys.modules["vitpar.data.sources.parquet"], "MAX_RECORD_BYTES", 1 << 23)
    with pytest.raises(DataError, match=r"a group of rows of .* has more than 8,388,608 bytes"):
        open_source(tmp_path).splits["train"].read(0)


# TFRecords and CIFAR.


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    write_tfrecords(tmp_path / "source")
    path = next((tmp_path / "source").glob("train-*"))
    whole = path.read_bytes()
    assert google_crc32c.value(b"123456789") == 0xE3069283, "RFC 3720, appendix B.4, has this polynomial's values"
    place = whole.index(b"IHDR") + 30
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    split = open_source(tmp_path / "source").splits["train"]
    wrong = []
    for i in range(len(split.names)):
        try:
            split.read(i)
        except DataError as error:
            wrong.append(str(error))
    assert len(wrong) == 1 and "is damaged: fetch it again" in wrong[0]


@pytest.fixture
def cifar(tmp_path: Path) -> Iterator[Callable[[bytes], Path]]:
    """Writes CIFAR-100 with this pickle for its training images."""

    def write(train: bytes) -> Path:
        folder = tmp_path / "cifar"
        folder.mkdir(exist_ok=True)
        good = {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0, 1]}
        (folder / "train").write_bytes(train)
        (folder / "test").write_bytes(pickle.dumps(good, protocol=2))
        (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"a", b"b"]}, protocol=2))
        return folder

    yield write


class Forged:
    """An array whose type says that its bytes are pointers to objects."""

    def __init__(self, code: str, state: tuple[Any, ...]) -> None:
        self.code, self.state = code, state

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            _reconstruct,
            (np.ndarray, (0,), b"b"),
            (1, (2, 3072), _ForgedType(self.code, self.state), False, b"A" * 6144),
        )


class _ForgedType:
    def __init__(self, code: str, state: tuple[Any, ...]) -> None:
        self.code, self.state = code, state

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, (self.code, False, True), self.state


_reconstruct = np.ndarray.__reduce__(np.empty(0))[0]
PLAIN = (3, "|", None, None, None, -1, -1, 0)


@pytest.mark.parametrize(
    ("code", "state", "message"),
    [
        ("u1", PLAIN, None),
        ("O", (3, "|", None, None, None, -1, -1, 63), "its numbers are of type O"),
        ("V8", (3, "|", None, ("a",), {"a": (np.dtype("u1"), 0)}, 8, 1, 16), "no plain type"),
        ("u1", (3, "|", (np.dtype("u1"), (1 << 40,)), None, None, -1, -1, 0), "no plain type"),
        ("f8", (3, "<", None, None, None, -1, -1, 0), "its numbers are of type f8"),
    ],
)
def test_forged_arrays_are_refused(
    code: str, state: tuple[Any, ...], message: str | None, cifar: Callable[[bytes], Path]
) -> None:
    folder = cifar(pickle.dumps({b"data": Forged(code, state), b"fine_labels": [0, 1]}, protocol=2))
    if message is None:
        assert open_source(folder).splits["train"].labels.tolist() == [0, 1]
    else:
        with pytest.raises(DataError, match=message):
            open_source(folder)


def test_pickles_cannot_ask_for_room(cifar: Callable[[bytes], Path]) -> None:
    with pytest.raises(DataError, match="an object has too high a number"):
        open_source(cifar(b"\x80\x02}r\xff\xff\xff\x7f."))
    with pytest.raises(DataError, match="cannot be read"):
        open_source(cifar(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"."))


@pytest.mark.timeout(30)
def test_lists_that_share_their_items_are_not_expanded(cifar: Callable[[bytes], Path]) -> None:
    labels: list[Any] = [1] * 1000
    for _ in range(3):
        labels = [labels] * 1000
    pixels = np.zeros((1000, 3072), np.uint8)
    with pytest.raises(DataError, match="does not hold images and labels"):
        open_source(cifar(pickle.dumps({b"data": pixels, b"fine_labels": labels}, protocol=2)))
    folder = cifar(pickle.dumps({b"data": pixels, b"fine_labels": [0] * 1000}, protocol=5))
    assert len(open_source(folder).splits["train"].labels) == 1000
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"x" * 10**6] * 1000}, protocol=2))
    with pytest.raises(DataError, match="does not name its classes"):
        open_source(folder)


@pytest.mark.timeout(60)
def test_an_archive_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vitpar.data.sources.cifar"], "MAX_RECORD_BYTES", 1 << 22)
    path = tmp_path / "cifar.tar.gz"
    path.write_bytes(gzip.compress(header("data_batch_1", tarfile.REGTYPE, 1 << 30) + bytes(1 << 24)))
    with pytest.raises(DataError, match="it unpacks to more than"):
        open_source(path)
    with path.open("r+b") as file:  # behind what is compressed there is nothing to be read, however much it is
        file.write(gzip.compress(END))
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="no archive of CIFAR"):
        open_source(path)
