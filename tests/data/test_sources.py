"""Every kind of data source: its images and labels are packed as they were written, in splits by one rule."""

import csv
import io
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from helpers.archives import cifar_files, tar
from helpers.tiny_images import CLASSES, encoded, write_classes
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.sources import open_source
from vitpar.errors import DataError


def packed_images(folder, split):
    """Return the sorted (label, encoded image) pairs of a packed split."""
    shards = ShardSet.open(folder, split)
    return sorted((shards.label(i), shards.read(i)) for i in range(len(shards)))


def write_archive(path, files):
    path.write_bytes(tar(((f"cifar/{name}", data) for name, data in files.items()), "w:gz"))


@pytest.mark.parametrize("hundred", [False, True])
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("archive", [False, True])
def test_cifar_is_packed_unchanged(tmp_path, hundred, binary, archive):
    files, images, words = cifar_files(hundred, binary)
    source = tmp_path / ("cifar.tar.gz" if archive else "cifar")
    if archive:
        write_archive(source, files)
    else:
        source.mkdir()
        for name, data in files.items():
            (source / name).write_bytes(data)
    assert pack(source, tmp_path / "packed").classes == words
    for split, expected in images.items():
        shards = ShardSet.open(tmp_path / "packed", split)
        found = sorted(
            (shards.label(i), np.asarray(Image.open(io.BytesIO(shards.read(i)))).transpose(2, 0, 1).tobytes())
            for i in range(len(shards))
        )
        assert found == sorted((label, pixels.tobytes()) for label, pixels in expected)


class Hostile:
    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


def test_cifar_pickles_run_no_code(tmp_path):
    files, _, _ = cifar_files(hundred=False, binary=False)
    files["data_batch_3"] = pickle.dumps({b"data": Hostile()}, protocol=2)
    write_archive(tmp_path / "cifar.tar.gz", files)
    with pytest.raises(DataError, match="CIFAR file 'data_batch_3' cannot be read"):
        open_source(tmp_path / "cifar.tar.gz")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("data_batch_2", b"\x80\x02}q\x00.", "CIFAR file 'data_batch_2' cannot be read"),
        ("data_batch_2", b"rubbish", "CIFAR file 'data_batch_2' cannot be read"),
        (
            "data_batch_2",
            pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [0, 1]}, 2),
            "lacks images or labels",
        ),
    ],
)
def test_damaged_cifar_is_refused(tmp_path, name, data, message):
    files, _, _ = cifar_files(hundred=False, binary=False)
    write_archive(tmp_path / "cifar.tar.gz", {**files, name: data})
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / "cifar.tar.gz")
    whole = (tmp_path / "cifar.tar.gz").read_bytes()
    (tmp_path / "cifar.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="is not a valid tar file"):
        open_source(tmp_path / "cifar.tar.gz")


def table(
    labels: list[Any], first: int = 0, raw: bool = False, names: Sequence[str] = (), column: str = "label"
) -> pa.Table:
    """Return a table of the images from `first` on, as structs or as bytes, with labels and names of classes."""
    pixels = [encoded(first + number) for number in range(len(labels))]
    structs = pa.array([{"bytes": data, "path": None} for data in pixels])
    made = pa.table({"image": pa.array(pixels) if raw else structs, column: pa.array(labels, pa.int64())})
    about = json.dumps({"info": {"features": {column: {"names": [*names]}}}})
    return made.replace_schema_metadata({"huggingface": about} if names else {})


@pytest.mark.parametrize("named", [True, False])
def test_parquet_is_packed_unchanged(tmp_path, named):
    (folder := tmp_path / "source" / ("data" if named else "")).mkdir(parents=True)
    files = {"train-00000-of-00002": 12, "train-00001-of-00002": 11, "validation-00000-of-00001": 3}
    expected, column = {"train": [], "val": []}, "labels" if named else "label"
    for number, (name, count) in enumerate(files.items()):
        first, labels = 20 * number, [i % 3 for i in range(count)]
        made = table(labels, first, names=CLASSES if named else (), column=column)
        parquet.write_table(made, folder / f"{name}.parquet", row_group_size=4)
        expected["train" if number < 2 else "val"] += [(label, encoded(first + i)) for i, label in enumerate(labels)]
    manifest = pack(tmp_path / "source", tmp_path / "packed", shard_samples=7, workers=3)
    assert manifest.classes == (list(CLASSES) if named else ["0", "1", "2"])
    for split, images in expected.items():
        assert packed_images(tmp_path / "packed", split) == sorted(images)


TEN = [0, 1] * 5
PARQUET: dict[str, tuple[dict[str, list[Any]], dict[str, int] | str]] = {
    "configuration": ({"plain/train-00000": TEN, "plain/test-00000": [0]}, {"train": 8, "val": 2, "test": 1}),
    "folders of splits": ({"default/train/0000": TEN, "default/validation/0000": [0]}, {"train": 10, "val": 1}),
    "two configurations": ({"one/train-0": TEN, "two/train-0": TEN}, "has Parquet files in one or two: name one"),
    "secret labels": ({"train-0": TEN, "test-0": [-1, -1]}, {"train": 8, "val": 2}),
    "longer names, secret labels": (
        {"tiny-test": [-1, -1], "tiny-valid-00000-of-00001": [0, 1], "tiny-train": [1, 0, 1]},
        {"train": 3, "val": 2},
    ),
    "no train": ({"tiny-valid-0": [0, 1]}, "has val but no training split"),
    "no split in a name": ({"tiny-train": [1, 0], "more": [1]}, "more.parquet' lacks a split in its name"),
    "no labels": ({"train-0": TEN, "test-0": [None, None]}, {"train": 8, "val": 2}),
    "a missing label": (
        {"train-0": [0, 1, None]},
        r"1 rows of 'train' in .* have no label \(null or -1\), the first is row 2",
    ),
}


@pytest.mark.parametrize("name", PARQUET)
def test_parquet_files(name: str, tmp_path: Path) -> None:
    files, expected = PARQUET[name]
    for path, labels in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table(labels), tmp_path / f"{path}.parquet")
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            open_source(tmp_path)
    else:
        source = open_source(tmp_path)
        assert {split: len(found.labels) for split, found in source.splits.items()} == expected
        assert bool(source.left_out) == ("labels" in name)


def test_parquet_column_of_bytes(tmp_path: Path) -> None:
    parquet.write_table(table(TEN, raw=True), tmp_path / "train.parquet")
    pack(tmp_path, tmp_path / "packed", val_fraction=0)
    shards = ShardSet.open(tmp_path / "packed", "train")
    assert {shards.read(i) for i in range(10)} == {encoded(i) for i in range(10)}


def test_bad_parquet_is_refused(tmp_path):
    parquet.write_table(table(TEN), path := tmp_path / "train.parquet")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        open_source(tmp_path)
    parquet.write_table(pa.table({"picture": [b"x"], "label": [0]}), path)
    with pytest.raises(DataError, match="has the columns picture, label: it needs `image`"):
        open_source(tmp_path)


def write_list(folder, rows, names=("path", "label", "split")):
    with (folder / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([names, *rows])
    return folder / "list.csv"


@pytest.mark.parametrize("named", [True, False])
def test_csv_lists_are_packed_unchanged(tmp_path, named):
    labels = write_classes(tmp_path, 3)
    files = sorted(tmp_path.glob("*/*.*"))
    rows = [(p.relative_to(tmp_path), p.parent.name if named else CLASSES.index(p.parent.name), "") for p in files]
    rows[-1] = (*rows[-1][:2], "val")
    manifest = pack(write_list(tmp_path, rows), tmp_path / "packed")
    assert manifest.classes == (list(CLASSES) if named else ["0", "1", "2"])
    found = packed_images(tmp_path / "packed", "train") + packed_images(tmp_path / "packed", "val")
    assert sorted(found) == sorted((label, image) for image, label in labels.items())
    assert manifest.splits["val"].samples == 1


def test_csv_list_in_the_working_folder_cannot_leave_it(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_list(tmp_path / "here", [("../secret.png", "0")])
    with pytest.raises(DataError, match="is outside the list's folder"):
        open_source("list.csv")
    (tmp_path / "here" / "list.csv").write_bytes("\ufeffpath,label\na.png,²\nb.png,--1\nc.png,²\nd.png,--1\n".encode())
    assert open_source("list.csv", val_fraction=0.5).classes == ["--1", "²"]


@pytest.mark.parametrize(
    ("row", "names", "message"),
    [
        (("../secret.png", "0"), ("path", "label"), "'../secret.png' in line 2 of .* is outside the list's folder"),
        (("/etc/passwd", "0"), ("path", "label"), "'/etc/passwd' in line 2 of .* is outside the list's folder"),
        (("a.png", ""), ("path", "label"), "line 2 of .* has no label"),
        (("a.png", "-1"), ("path", "label"), "label -1 is outside 0 to"),
        (("a.png", "0", "extra"), ("path", "label", "split"), "unknown split 'extra' in line 2 of .*"),
        (("a.png", "0"), ("file", "label"), "lacks the column 'path'"),
        (("a.png", "0"), ("path", "label"), "cannot read '.*a.png': No such file"),
    ],
)
def test_bad_csv_lists_are_refused(tmp_path, row, names, message):
    path = write_list(tmp_path, [row] * 5, names)
    with pytest.raises(DataError, match=message):
        pack(path, tmp_path / "packed")


def test_splits_of_a_list(tmp_path: Path) -> None:
    write(tmp_path, {".": 6})
    splits = ("train", "Training", "", "valid", "TEST", "dev")
    rows = [f"{number}.png,{number % 2},{split}" for number, split in enumerate(splits)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    source = open_source(tmp_path / "list.csv")
    assert {split: len(found.labels) for split, found in source.splits.items()} == {"train": 3, "val": 2, "test": 1}


TRAIN = {"train/a": 5, "train/b": 5}
VAL = {"val/a": 2, "val/b": 2}
FOLDERS: dict[str, tuple[dict[str, int], dict[str, int] | str, str]] = {
    # images of each folder, images of each split or the error, words on what is left out
    "plain": (TRAIN | VAL, {"train": 10, "val": 4}, ""),
    "capitals": ({"Train/a": 5, "Train/b": 5, "VAL/a": 2}, {"train": 10, "val": 2}, ""),
    "valid": (TRAIN | {"valid/a": 3}, {"train": 10, "val": 3}, ""),
    "other words": ({"training/a": 5, "Validation/a": 3, "testing/a": 1}, {"train": 5, "val": 3, "test": 1}, ""),
    "eval": (TRAIN | {"eval/b": 3}, {"train": 10, "val": 3}, ""),
    "dev": (TRAIN | {"dev/b": 3}, {"train": 10, "val": 3}, ""),
    "labelled test without val": (TRAIN | {"test/a": 3}, {"train": 8, "val": 2, "test": 3}, ""),
    "unlabelled test": (TRAIN | VAL | {"test": 3}, {"train": 10, "val": 4}, "test': its images are not in class"),
    "unlabelled test in a folder": (TRAIN | VAL | {"test/images": 3}, {"train": 10, "val": 4}, "have no labels"),
    "another folder": (TRAIN | VAL | {"extra/a": 3}, {"train": 10, "val": 4}, "extra': it is neither train, val nor"),
    "classes only": ({"a": 5, "b": 5}, {"train": 8, "val": 2}, ""),
    "a class called train": ({"bus": 5, "train": 5}, {"train": 8, "val": 2}, ""),
    "a class called test": ({"bus": 5, "test": 5}, {"train": 8, "val": 2}, ""),
    "two vals": (TRAIN | VAL | {"valid/a": 1}, "val' and '.*valid' are both the val split: keep one", ""),
    "flat val": (
        TRAIN | {"val": 3},
        "val' has images but no class folders: sort them into val/<class>/",
        "",
    ),
    "flat train": ({"train": 3} | VAL, "train' has no class folders: sort images into train/<class>/", ""),
    "no train": (VAL | {"test/a": 3}, "has test, val but no training split", ""),
    "another class": (TRAIN | {"val/a": 1, "val/c": 1}, "class folder '.*val/c' has no counterpart in '.*train'", ""),
}


def write(folder: Path, images: dict[str, int]) -> None:
    """Write `images` of each subfolder."""
    number = 0
    for name, count in images.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            (folder / name / f"{number}.png").write_bytes(encoded(number))
            number += 1


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str, tmp_path: Path) -> None:
    images, expected, words = FOLDERS[name]
    write(tmp_path, images)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            open_source(tmp_path)
        return
    source = open_source(tmp_path)
    assert {split: len(found.labels) for split, found in source.splits.items()} == expected
    lines = source.describe("here")
    assert any("left out" in line and words in line for line in lines) == bool(words)
    assert any("20 % of each class of train" in line for line in lines) == (expected["train"] == 8)


def test_annotations_of_tiny_imagenet(tmp_path: Path) -> None:
    write(tmp_path, {"train/n1/images": 3, "train/n2/images": 3, "val/images": 2, "test/images": 2})
    names = sorted(path.name for path in (tmp_path / "val/images").iterdir())
    lines = [f"{names[0]}\tn2\t0\t0\t9\t9\n", f"{names[1]}\tn1\t0\t0\t9\t9\n"]
    (tmp_path / "val/val_annotations.txt").write_text("".join(lines))
    source = open_source(tmp_path)
    assert source.classes == ["n1", "n2"] and source.splits["val"].labels.tolist() == [1, 0]
    assert source.splits["val"].read(0) == (tmp_path / "val/images" / names[0]).read_bytes()
    assert [line for line in source.left_out if "test" in line] and "test" not in source.splits
    unknown = ("0.png\tn3\n", "line 1 of .* is .*n3': it needs an image, a tab, and a class of train")
    for wrong, words in (unknown, ("../x.png\tn1\n", "names '../x.png', which")):
        (tmp_path / "val/val_annotations.txt").write_text(wrong)
        with pytest.raises(DataError, match=words):
            open_source(tmp_path)
