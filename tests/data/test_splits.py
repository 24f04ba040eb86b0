"""One rule for the names of splits, in every kind of source: use a split, or say why not."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from helpers.tiny_images import encoded
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.sources import open_source
from vitpar.errors import DataError

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


def table(labels: list[Any], raw: bool = False) -> pa.Table:
    """Return a table of images, as structs or as bytes, and labels."""
    pixels = [encoded(number) for number in range(len(labels))]
    structs = pa.array([{"bytes": data, "path": None} for data in pixels])
    return pa.table({"image": pa.array(pixels) if raw else structs, "label": pa.array(labels, pa.int64())})


TEN = [0, 1] * 5
PARQUET: dict[str, tuple[dict[str, list[Any]], dict[str, int] | str]] = {
    "configuration": ({"plain/train-00000": TEN, "plain/test-00000": [0]}, {"train": 8, "val": 2, "test": 1}),
    "folders of splits": ({"default/train/0000": TEN, "default/validation/0000": [0]}, {"train": 10, "val": 1}),
    "two configurations": ({"one/train-0": TEN, "two/train-0": TEN}, "has Parquet files in one or two: name one"),
    "secret labels": ({"train-0": TEN, "test-0": [-1, -1]}, {"train": 8, "val": 2}),
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


def test_splits_of_a_list(tmp_path: Path) -> None:
    write(tmp_path, {".": 6})
    splits = ("train", "Training", "", "valid", "TEST", "dev")
    rows = [f"{number}.png,{number % 2},{split}" for number, split in enumerate(splits)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    source = open_source(tmp_path / "list.csv")
    assert {split: len(found.labels) for split, found in source.splits.items()} == {"train": 3, "val": 2, "test": 1}
