"""Source files for packing that were made to run code, exhaust memory or time, or yield damaged images."""

import gzip
import pickle
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from helpers.hostile_files import header
from helpers.tfrecord_files import write_tfrecords
from helpers.tiny_images import encoded, write_tree, write_zips
from vitpar.data.sources import open_source
from vitpar.errors import DataError


@pytest.mark.timeout(30)
def test_symlink_cycles_terminate(tmp_path: Path) -> None:
    labels = write_tree(tmp_path / "source")
    for name in ("up", "again"):
        (tmp_path / "source" / "train" / "ant" / name).symlink_to("..", target_is_directory=True)
    source = open_source(tmp_path / "source")
    assert sum(len(split.labels) for split in source.splits.values()) >= len(labels)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "train").symlink_to("train")
    with pytest.raises(DataError, match=r"cannot read .*Too many levels"):
        open_source(tmp_path / "self")


@pytest.mark.parametrize("name", ["a\0.png", "x" * 5000])
def test_impossible_file_names_in_lists_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "list.csv").write_text(f"path,label,split\n{name},1,train\n{name},0,val\n")
    with pytest.raises(DataError) as refused:
        open_source(tmp_path / "list.csv").splits["train"].read(0)
    assert len(str(refused.value)) < 700


def test_zip_entry_larger_than_its_claim_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(DataError, match="has 3,221,225,472 bytes: the limit for images is"):
        open_source(tmp_path / "source").splits["train"].read(0)


def test_parquet_files_that_expand_in_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = pa.array([{"bytes": b"x" * (1 << 20)}] * 60, pa.struct({"bytes": pa.binary()}))
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"image": image, "label": ["y" * (1 << 20)] * 60}), path)
    with pytest.raises(DataError, match=r"it needs `image` \(bytes\) and `label` \(integers\)"):
        open_source(tmp_path)
    parquet.write_table(pa.table({"image": image, "label": [i % 2 for i in range(60)]}), path)
    assert path.stat().st_size < 1 << 20, "the image is in the file once"
    split = open_source(tmp_path).splits["train"]
    assert len(split.read(0)) == 1 << 20
    monkeypatch.setattr(sys.modules["vitpar.data.sources.parquet"], "MAX_RECORD_BYTES", 1 << 23)
    read, rows = parquet.ParquetFile.iter_batches, list[int]()
    monkeypatch.setattr(
        parquet.ParquetFile, "iter_batches", lambda file, size, **more: rows.append(size) or read(file, size, **more)
    )
    with pytest.raises(DataError, match=r"a row group of .* has more than 8,388,608 bytes"):
        open_source(tmp_path).splits["train"].read(0)
    assert rows == [1], "a quarter of the limit has only one image of a MiB and its header"


def test_damaged_tfrecord_is_refused(tmp_path: Path) -> None:
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
    """Yield a function that writes CIFAR-100 with a given pickle for its training images."""

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
    """Array whose forged dtype claims that its bytes are pointers to objects."""

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
        ("O", (3, "|", None, None, None, -1, -1, 63), "its dtype O is not supported"),
        ("V8", (3, "|", None, ("a",), {"a": (np.dtype("u1"), 0)}, 8, 1, 16), "its dtype is not supported"),
        ("u1", (3, "|", (np.dtype("u1"), (1 << 40,)), None, None, -1, -1, 0), "its dtype is not supported"),
        ("f8", (3, "<", None, None, None, -1, -1, 0), "its dtype f8 is not supported"),
    ],
)
def test_forged_pickled_arrays_are_refused(
    code: str, state: tuple[Any, ...], message: str | None, cifar: Callable[[bytes], Path]
) -> None:
    folder = cifar(pickle.dumps({b"data": Forged(code, state), b"fine_labels": [0, 1]}, protocol=2))
    if message is None:
        assert open_source(folder).splits["train"].labels.tolist() == [0, 1]
    else:
        with pytest.raises(DataError, match=message):
            open_source(folder)


def test_pickles_cannot_allocate_without_limit(cifar: Callable[[bytes], Path]) -> None:
    with pytest.raises(DataError, match="an object's number is too high"):
        open_source(cifar(b"\x80\x02}r\xff\xff\xff\x7f."))
    with pytest.raises(DataError, match="cannot be read"):
        open_source(cifar(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"."))


@pytest.mark.timeout(30)
def test_nested_shared_lists_are_not_expanded(cifar: Callable[[bytes], Path]) -> None:
    labels: list[Any] = [1] * 1000
    for _ in range(3):
        labels = [labels] * 1000
    pixels = np.zeros((1000, 3072), np.uint8)
    with pytest.raises(DataError, match="lacks images or labels"):
        open_source(cifar(pickle.dumps({b"data": pixels, b"fine_labels": labels}, protocol=2)))
    folder = cifar(pickle.dumps({b"data": pixels, b"fine_labels": [0] * 1000}, protocol=5))
    assert len(open_source(folder).splits["train"].labels) == 1000
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"x" * 10**6] * 1000}, protocol=2))
    with pytest.raises(DataError, match="has no class names"):
        open_source(folder)


@pytest.mark.timeout(60)
def test_archive_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vitpar.data.sources.arrays"], "MAX_ARCHIVE_BYTES", 1 << 22)
    path = tmp_path / "cifar.tar.gz"
    path.write_bytes(gzip.compress(header("data_batch_1", tarfile.REGTYPE, 1 << 30) + bytes(1 << 24)))
    with pytest.raises(DataError, match="it unpacks to more than"):
        open_source(path)
    with path.open("r+b") as file:  # nothing after the compressed data is read, however long the file is
        file.write(gzip.compress(bytes(1024)))
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="nor a CIFAR archive"):
        open_source(path)
