"""Every kind of data source: packing returns exactly the images and labels that were written."""

import csv
import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image

from helpers.cifar_files import cifar_files
from helpers.imagenet_archives import tar
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


def write_parquet(folder, named=True, data=True):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    target = folder / "data" if data else folder
    target.mkdir(parents=True)
    images = {"train": [(i % 3, encoded(i)) for i in range(23)], "val": [(i, encoded(90 + i)) for i in range(3)]}
    info = {"info": {"features": {"labels": {"names": list(CLASSES)}}}}
    for word, found in (("train", images["train"]), ("validation", images["val"])):
        for part in range(2):
            rows = found[part::2]
            table = pa.table(
                {
                    "image": pa.array([{"bytes": image, "path": None} for _, image in rows]),
                    "labels": pa.array([label for label, _ in rows]),
                }
            )
            table = table.replace_schema_metadata({"huggingface": json.dumps(info)} if named else {})
            parquet.write_table(table, target / f"{word}-{part:05d}-of-00002.parquet", row_group_size=4)
    return {split: sorted(found) for split, found in images.items()}


@pytest.mark.parametrize("named", [True, False])
def test_parquet_is_packed_unchanged(tmp_path, named):
    expected = write_parquet(tmp_path / "source", named, data=named)
    manifest = pack(tmp_path / "source", tmp_path / "packed", shard_samples=7, workers=3)
    assert manifest.classes == (list(CLASSES) if named else ["0", "1", "2"])
    for split, images in expected.items():
        assert packed_images(tmp_path / "packed", split) == images


def test_parquet_file_names_determine_the_split(tmp_path):
    """Longer names work too. A test set of a contest has no labels and is ignored.

    Without training files packing is refused.
    """
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tmp_path.joinpath("source").mkdir()

    def write(name, labels):
        images = pa.array([{"bytes": encoded(i)} for i in range(len(labels))])
        parquet.write_table(pa.table({"image": images, "label": labels}), tmp_path / "source" / name)

    write("tiny-test.parquet", [-1, -1])
    write("tiny-valid-00000-of-00001.parquet", [0, 1])
    with pytest.raises(DataError, match="has val but no training split"):
        open_source(tmp_path / "source")
    write("tiny-train.parquet", [1, 0, 1])
    source = open_source(tmp_path / "source")
    assert {name: len(split.labels) for name, split in source.splits.items()} == {"train": 3, "val": 2}
    write("more.parquet", [1])
    with pytest.raises(DataError, match=r"more.parquet' lacks a split in its name"):
        open_source(tmp_path / "source")


def test_bad_parquet_is_refused(tmp_path):
    write_parquet(tmp_path / "source", data=False)
    path = next((tmp_path / "source").glob("train-00001*"))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        open_source(tmp_path / "source")
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"picture": [b"x"], "label": [0]}), path)
    with pytest.raises(DataError, match="has the columns picture, label: it needs `image`"):
        open_source(tmp_path / "source")


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
