"""Source files for packing that were made to run code or to yield damaged images."""

import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.hostile_files import accepted
from helpers.hostile_pieces import PICKLES
from helpers.tiny_images import write_tree
from vitpar.data.images import decode
from vitpar.data.shards.pack import pack
from vitpar.data.sources import open_source
from vitpar.data.text.pack import pack_text
from vitpar.data.text.tokenizer import open_tokenizer
from vitpar.errors import DataError
from vitpar.weights.foreign import open_source as open_weights_of_others


@pytest.mark.timeout(30)
def test_symlink_cycles_terminate(tmp_path: Path) -> None:
    labels = write_tree(tmp_path / "source")
    for name in ("up", "again"):
        (tmp_path / "source" / "train" / "ant" / name).symlink_to("..", target_is_directory=True)
    source = open_source(tmp_path / "source")
    assert sum(len(split.labels) for split in source.splits.values()) >= len(labels)


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
    """Object that is pickled as these parts: a function, its arguments, and the state of the result."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


_reconstruct = np.ndarray.__reduce__(np.empty(0))[0]
PLAIN = (3, "|", None, None, None, -1, -1, 0)


@pytest.mark.parametrize(
    ("code", "state", "used"),
    [
        ("u1", PLAIN, True),
        ("u1", (3, "|", (np.dtype("u1"), (1 << 40,)), None, None, -1, -1, 0), True),
        ("O", (3, "|", None, None, None, -1, -1, 63), False),
        ("V8", (3, "|", None, ("a",), {"a": (np.dtype("u1"), 0)}, 8, 1, 16), False),
        ("f8", (3, "<", None, None, None, -1, -1, 0), False),
    ],
)
def test_forged_pickled_arrays_are_bytes_or_refused(
    code: str, state: tuple[Any, ...], used: bool, cifar: Callable[[bytes], Path]
) -> None:
    """A forged dtype claims that the bytes of an array are pointers to objects, or fewer than they are."""
    dtype = Forged(np.dtype, (code, False, True), state)
    array = Forged(_reconstruct, (np.ndarray, (0,), b"b"), (1, (2, 3072), dtype, False, b"A" * 6144))
    folder = cifar(pickle.dumps({b"data": array, b"fine_labels": [0, 1]}, protocol=2))
    if used:
        split = open_source(folder).splits["train"]
        assert split.labels.tolist() == [0, 1] and {*decode(split.read(0)).ravel().tolist()} == {ord("A")}
    else:
        with pytest.raises(DataError, match="CIFAR file 'train' cannot be read"):
            open_source(folder)


def test_hostile_pickles_are_refused(cifar: Callable[[bytes], Path]) -> None:
    for content in PICKLES:
        assert not accepted(open_source, cifar(content)), content[:200]
    assert not Path("hostile").exists()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"
PAGES = (b"<!DOCTYPE html>\n<html><body>Sign in</body></html>", b"\xef\xbb\xbf\n<HTML><body>Sign in</body></html>")


def pack_classes(folder: Path, begin: bytes) -> None:
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (folder / "images" / split / name).mkdir(parents=True)
            (folder / "images" / split / name / "1.jpg").write_bytes(begin)
    pack(folder / "images", folder / "packed")


def pack_zips(folder: Path, begin: bytes) -> None:
    (folder / "images").mkdir()
    for split in ("train", "val"):
        with zipfile.ZipFile(folder / "images" / f"{split}.zip", "w") as archive:
            archive.writestr("1.jpg", begin)
        (folder / "images" / f"{split}_map.txt").write_text("1.jpg\t0\n")
    pack(folder / "images", folder / "packed")


def file(name: str, use: Callable[[Path], object]) -> tuple[str, Callable[[Path, bytes], None]]:
    """Return a row of READERS. use: reads the file `name`."""

    def read(folder: Path, begin: bytes) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(begin)
        use(folder / name)

    return name, read


def packed_text(path: Path) -> object:
    return pack_text(path, path.with_name("packed"), 8, val_fraction=0)


READERS = (
    ("class folders", pack_classes),
    ("zip files", pack_zips),
    *(file(name, lambda path: open_source(path)) for name in ("list.csv", "cifar-10-python.tar.gz")),
    file("images/a-0-of-1.parquet", lambda path: open_source(path.parent)),
    *(file(f"corpus.{kind}", packed_text) for kind in ("txt", "txt.gz", "jsonl", "parquet")),
    file("tokenizer.json", lambda path: open_tokenizer(str(path))),
    *(file(f"model.{kind}", open_weights_of_others) for kind in ("pth", "bin", "safetensors")),
    file("there/config.json", lambda path: open_weights_of_others(path.parent)),
)


@pytest.mark.parametrize(("name", "read"), READERS, ids=[row[0] for row in READERS])
def test_pointers_and_pages_in_place_of_files_are_named(
    name: str, read: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    for number, begin in enumerate((POINTER, *PAGES)):
        (folder := tmp_path / str(number)).mkdir()
        if name == "corpus.txt" and begin != POINTER:
            read(folder, begin)  # documents may be pages
            continue
        words = "it is a pointer of git-lfs: run `git lfs pull`" if begin == POINTER else "it is a web page: fetch the"
        with pytest.raises(DataError, match=f"{re.escape(name) if '.' in name else '1.jpg'}.*{words}"):
            read(folder, begin)
