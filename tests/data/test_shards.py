"""Shards: indexing of those of other tools, random access, verification, and refusal of what does not match."""

import hashlib
import json
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import webdataset
from typer.testing import CliRunner

from helpers.hostile_files import write_tar
from helpers.tiny_images import CLASSES, encoded, write_tree
from vitpar.data.loader import TrainLoader
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards import manifest
from vitpar.data.shards.index import Labels, index, scan
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.shards.verify import verify
from vitpar.data.transforms.sample import TrainTransform
from vitpar.errors import DataError
from vitpar_cli.data import app


@pytest.fixture
def foreign(tmp_path):
    """Write two training shards and one validation shard with the webdataset library."""
    for name, first, count in (("a-train-0", 0, 5), ("a-train-1", 5, 4), ("a-val-0", 9, 3)):
        with webdataset.TarWriter(str(tmp_path / f"{name}.tar")) as writer:
            for i in range(first, first + count):
                image = {"png": encoded(i)} if i % 2 else {"jpeg": encoded(i, "JPEG")}
                writer.write({"__key__": f"some/where/{i}", "cls": i % 3, "json": {"label": i % 2}, **image})
    return tmp_path


@pytest.mark.parametrize(("labels", "classes"), [(Labels(), 3), (Labels("json"), 2)])
def test_webdataset_shards_are_indexed_and_trained_on(foreign, labels, classes):
    before = {path.name: path.read_bytes() for path in foreign.glob("*.tar")}
    manifest = index(foreign, labels=labels)
    assert {name: split.samples for name, split in manifest.splits.items()} == {"train": 9, "val": 3}
    train = ShardSet.open(foreign, "train")
    assert train.labels.tolist() == [i % classes for i in range(9)] and train.classes == tuple("012"[:classes])
    assert [train.read(i) for i in range(9)] == [encoded(i, "PNG" if i % 2 else "JPEG") for i in range(9)]
    assert train.name(7) == "a-train-1.tar/some/where/7"
    batch = next(iter(TrainLoader(train, TrainTransform(8), order=SampleOrder(0, 9), batch_size=9)))
    assert batch.images.shape == (9, 3, 8, 8)
    assert before == {path.name: path.read_bytes() for path in foreign.glob("*.tar")}
    assert not list(verify(foreign))


def test_folder_names_become_classes(tmp_path):
    for shard, names in enumerate((("bee/1.png", "ant/2.png"), ("cat/3.JPEG", "bee/4.png"))):
        write_tar(tmp_path / f"x-{shard}.tar", *((name, encoded(int(name[4]))) for name in names))
    index(tmp_path, labels=Labels("folder"), splits={"train": "x-*.tar"})
    train = ShardSet.open(tmp_path, "train")
    assert train.classes == ("ant", "bee", "cat") and train.labels.tolist() == [1, 0, 2, 1]
    index(tmp_path, labels=Labels("folder"), splits={"train": "x-*.tar"}, classes=["dog", "cat", "bee", "ant"])
    assert ShardSet.open(tmp_path, "train").labels.tolist() == [2, 3, 1, 2]
    with pytest.raises(DataError, match="class 'ant' in the shards is not one of the 1 named classes"):
        index(tmp_path, labels=Labels("folder"), splits={"train": "x-*.tar"}, classes=["dog"])


def test_names_in_label_members_become_classes(tmp_path):
    """Longer extensions count where a key has no plain one, and dots lead into JSON objects."""
    dog, cat = (json.dumps({"meta": {"label": name}}).encode() for name in ("dog", "cat"))
    members = [("0.png", encoded(0)), ("0.json", dog), ("1.image.jpg", encoded(1, "JPEG")), ("1.json", cat)]
    write_tar(tmp_path / "x.tar", *members, ("0.mask.png", encoded(2)))
    index(tmp_path, labels=Labels.parse("json:meta.label"), splits={"train": "x.tar"})
    train = ShardSet.open(tmp_path, "train")
    assert train.classes == ("cat", "dog") and train.labels.tolist() == [1, 0]
    assert [train.read(0), train.read(1)] == [encoded(0), encoded(1, "JPEG")] and not list(verify(tmp_path))
    members = [("0.png", encoded(0)), ("0.cls.txt", b"dog\n"), ("1.png", encoded(1)), ("1.cls.txt", b"ant")]
    write_tar(tmp_path / "y.tar", *members)
    index(tmp_path, splits={"train": "y.tar"})
    assert ShardSet.open(tmp_path, "train").classes == ("ant", "dog")
    write_tar(tmp_path / "z.tar", ("0.png", encoded(0)), ("0.cls", b"1"))
    with pytest.raises(DataError, match="some shards have numbers as labels and some have names"):
        index(tmp_path, splits={"train": "[yz].tar"})


PNG = encoded(1)


WRONG = [
    ([("a.png", PNG)], "cls", "sample 'x.tar/a' has no label"),
    ([("a.cls", b"1")], "cls", "sample 'x.tar/a' has no image"),
    ([("a.png", b""), ("a.cls", b"1")], "cls", "image 'x.tar/a.png' has 0 bytes"),
    ([("a.png", PNG), ("a.cls", b" ")], "cls", "label '' of 'x.tar/a.cls' is neither a whole number nor a name"),
    ([("a.png", PNG), ("a.cls", b"cat"), ("b.png", PNG), ("b.cls", b"1")], "cls", "some labels of 'x.tar' are numbers"),
    ([(f"a.{i}.v2.{kind}", PNG) for i in "12" for kind in ("png", "cls")], "cls", "key 'a' of 'x.tar' has 2 images"),
    ([("a.png", PNG), ("a.cls", b"-1")], "cls", "label -1 of 'x.tar/a.cls' is outside 0 to"),
    ([("a.png", PNG), ("a.cls", b"2000000000")], "cls", "label 2000000000 in the shards is above 999999"),
    ([("a.png", PNG), ("a.cls", b"1"), ("a.jpg", PNG)], "cls", "'x.tar/a.jpg' repeats the key 'a'"),
    ([("a.txt", b"hello")], "cls", "shard '.*x.tar' has no labelled images"),
    ([("a.png", PNG), ("a.json", b"{}")], "json:class", "has no field 'class'"),
    ([("a.png", PNG), ("a.json", b'{"label": [1]}')], "json", r"label \[1\] of .* is neither a whole number"),
    ([("a.png", PNG)], "folder", "image 'x.tar/a.png' is not in a class folder"),
]


@pytest.mark.parametrize(("members", "labels", "message"), WRONG)
def test_bad_shard_error_names_the_sample(tmp_path, members, labels, message):
    write_tar(tmp_path / "x.tar", *members)
    with pytest.raises(DataError, match=message):
        index(tmp_path, labels=Labels.parse(labels))
    assert not (tmp_path / "dataset.json").exists()


def test_samples_pair_members_by_key(tmp_path):
    members = [("x.png", encoded(1)), ("y.cls", b"4"), ("x.cls", b"7"), ("x.json", b"{}"), ("y.png", encoded(2))]
    path = write_tar(tmp_path / "a.tar", *members)
    rows, data = scan(path).rows, path.read_bytes()
    assert [data[r["offset"] : r["offset"] + r["size"]] for r in rows] == [encoded(1), encoded(2)]
    assert rows["label"].tolist() == [7, 4]


def test_folders_without_usable_shards_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no \.tar files in"):
        index(tmp_path)
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match="decompress the shards"):
        index(tmp_path)
    with pytest.raises(DataError, match=r"no file in .* matches 'b-.*' for the split 'train'"):
        index(tmp_path, splits={"train": "b-*.tar"})
    for pattern in ("/data/x-*.tar", "../x-*.tar"):
        with pytest.raises(DataError, match="must be a split name and a file name pattern, without folders"):
            index(tmp_path, splits={"train": pattern})
    with pytest.raises(DataError, match=r"no folder '.*nowhere' to index"):
        index(tmp_path / "nowhere")


def test_verify_names_each_bad_sample(tmp_path):
    write_tree(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed", shard_samples=8)
    shards = ShardSet.open(tmp_path / "packed", "train")
    cut = next(i for i in range(len(shards)) if shards.read(i) == encoded(0))
    for path in (tmp_path / "packed").glob("train-*.tar"):
        path.write_bytes(path.read_bytes().replace(encoded(0), encoded(0)[:-25] + bytes(25)))
    index(tmp_path / "packed")  # an index with the checksum of the damaged image
    path, data = tmp_path / "packed" / "val-000001.tar", ShardSet.open(tmp_path / "packed", "val").read(8)
    path.write_bytes(path.read_bytes().replace(data, data[:-1] + b"!"))
    found = list(verify(tmp_path / "packed"))
    assert [(problem.split, problem.sample) for problem in found] == [("train", cut), ("val", 8)]
    assert "cannot be decoded" in found[0].what and "checksum differs from the index" in found[1].what
    assert [problem.split for problem in verify(tmp_path / "packed", pixels=False)] == ["val"]
    shown = CliRunner().invoke(app, ["verify", str(tmp_path / "packed")])
    assert shown.exit_code == 1 and "2 problems in" in shown.output and "val 8 val-000001.tar/00000008" in shown.output
    shown = CliRunner().invoke(app, ["verify", str(tmp_path / "packed"), "--no-pixels", "--json"])
    assert len(json.loads(shown.stdout)["bad"]) == 1


def test_replaced_shard_is_detected(tmp_path):
    """The check runs when a shard is opened, and at the start of every epoch."""
    write_tree(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed")
    path = tmp_path / "packed" / "train-000000.tar"

    def replace():
        path.with_suffix(".new").write_bytes(path.read_bytes())
        path.with_suffix(".new").replace(path)

    train = ShardSet.open(tmp_path / "packed", "train")
    replace()
    with pytest.raises(DataError, match=r"train-000000.tar' was changed during use: restore it"):
        train.read(0)
    train = ShardSet.open(tmp_path / "packed", "train")
    batches = iter(TrainLoader(train, TrainTransform(8), order=SampleOrder(0, 21), batch_size=7, workers=0))
    for _ in range(3):
        next(batches)
    replace()
    with pytest.raises(DataError, match="was changed during use"):
        next(batches)


def test_reindexing_keeps_the_class_names(tmp_path):
    write_tree(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed")
    before = {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()}
    manifest = json.loads(before["dataset.json"])
    (tmp_path / "packed" / "dataset.json").write_text(json.dumps({**manifest, "vitpar_dataset": 1}))
    index(tmp_path / "packed")
    assert {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()} == before


def test_failed_indexing_leaves_the_old_index(foreign):
    index(foreign)
    before = {path.name: path.read_bytes() for path in foreign.iterdir()}
    write_tar(foreign / "a-val-1.tar", ("a.txt", b"no image"))
    with pytest.raises(DataError, match=r"a-val-1.tar' has no labelled images"):
        index(foreign)
    assert before == {path.name: path.read_bytes() for path in foreign.iterdir() if path.name != "a-val-1.tar"}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("imagenet-train-000012.tar", "train"),
        ("imagenet1k-validation-00.tar", "val"),
        ("x-valid-000-of-010.tar", "val"),
        ("photos-000-of-010.tar", "photos"),
        ("0001.tar", "train"),
    ],
)
def test_file_names_determine_the_split(tmp_path, name, split):
    write_tar(tmp_path / name, ("a.png", PNG), ("a.cls", b"0"))
    assert list(index(tmp_path).splits) == [split]


def test_index_command_works(foreign):
    names = foreign / "names.txt"
    names.write_text("ant\nbee\ncat\n")
    done = CliRunner().invoke(app, ["index", str(foreign), "--split", "train=a-train-*.tar", "--classes", str(names)])
    assert done.exit_code == 0 and "bee" in done.output and "val" not in done.output
    for options, message in (
        (["--label", "xml"], "unknown label location 'xml'"),
        (["--split", "train"], "'train' is not a split"),
        (["--classes", str(foreign / "none")], "cannot read '.*none'"),
    ):
        with pytest.raises(DataError, match=message):
            CliRunner().invoke(app, ["index", str(foreign), *options], catch_exceptions=False)


@pytest.fixture
def packed(packed, tmp_path):
    """Return a copy, which a test may damage."""
    return shutil.copytree(packed, tmp_path / "packed")


def members(path):
    """Return (name without extension, extension, bytes) of every member of a tar file."""
    with tarfile.open(path) as tar:
        return [(*m.name.split("."), tar.extractfile(m).read()) for m in tar]


def test_an_index_that_is_cut_while_it_is_used_still_serves(packed):
    data = ShardSet.open(packed, "train")
    (packed / "train.index.npy").write_bytes(b"")
    assert len(data.labels.tolist()) == len(data)  # the kernel would end the process at a mapping of the file


def test_reads_labels_and_names_agree_with_the_tar_files(packed):
    shards = ShardSet.open(packed, "train")
    expected = []
    for number in range(3):
        content = members(packed / f"train-{number:06d}.tar")
        for (key, _, label), (_, _, image) in zip(content[::2], content[1::2], strict=True):
            expected.append((f"train-{number:06d}.tar/{key}", int(label), image))
    assert [(shards.name(i), shards.label(i), shards.read(i)) for i in range(len(shards))] == expected
    assert shards.classes == CLASSES and shards.per_class == (7, 7, 7) and len(shards) == 21
    assert shards.bytes == sum(path.stat().st_size for path in packed.glob("train-*.tar"))


@pytest.mark.parametrize("open_files", [1, 256])
def test_concurrent_reads_return_the_same_bytes(packed, monkeypatch, open_files):
    expected = {i: ShardSet.open(packed, "train").read(i) for i in range(21)}
    monkeypatch.setattr("vitpar.data.shards.shard_set._OPEN_FILES", open_files)
    shards = ShardSet.open(packed, "train")
    order = np.random.default_rng(0).integers(0, 21, 4000).tolist()
    with ThreadPoolExecutor(8) as pool:
        for i, data in zip(order, pool.map(shards.read, order), strict=True):
            assert data == expected[i]


def edit_manifest(folder, change):
    path = folder / "dataset.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def edit_index(folder, change, signed=True):
    path = folder / "train.index.npy"
    np.save(path, change(np.load(path)))
    if signed:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        edit_manifest(folder, lambda m: m["splits"]["train"].update(index_sha256=digest))


def test_missing_digits_are_made_by_their_own_command(monkeypatch, tmp_path):
    folder = tmp_path / "digits"
    with pytest.raises(DataError, match=rf": make it with `vitpar data pack digits {folder}`$"):
        ShardSet.open(folder, "train")
    monkeypatch.setattr(manifest, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"`, after pip install -e '.\[digits\]'$"):
        ShardSet.open(folder, "train")


def with_value(rows, column, row, value):
    rows[column][row] = value
    return rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "dataset.json").unlink(), r"no data set at '.*': make one with `vitpar data pack .*packed"),
        (lambda d: (d / "dataset.json").write_text("{"), r"dataset.json' is damaged or from another version"),
        (lambda d: edit_manifest(d, lambda m: m.update(vitpar_dataset=1)), r"from another version \(vitpar_dataset: "),
        (lambda d: (d / "train-000001.tar").unlink(), r"shard '.*train-000001.tar' is missing"),
        (lambda d: (d / "train-000001.tar").write_bytes(b""), r"shard '.*train-000001.tar' has 0 bytes but \d+ were"),
        (lambda d: (d / "train.index.npy").unlink(), r"index '.*train.index.npy' cannot be read"),
        (lambda d: edit_index(d, lambda rows: rows[:-1]), "does not match the shards in dataset.json"),
        (
            lambda d: edit_index(d, lambda rows: with_value(rows, "label", 9, 0), signed=False),
            "is not the one recorded in",
        ),
        (lambda d: edit_index(d, lambda rows: with_value(rows, "shard", 3, 1)), "does not match the shards"),
        (lambda d: edit_index(d, lambda rows: with_value(rows, "offset", 20, 1 << 40)), "does not match the shards"),
        (lambda d: edit_index(d, lambda rows: with_value(rows, "label", 9, 3)), "does not match the shards"),
        (
            lambda d: edit_manifest(d, lambda m: m["splits"]["train"]["shards"][0].update(file="../train-000000.tar")),
            r"the shard '../train-000000.tar' is outside the folder",
        ),
        (
            lambda d: edit_manifest(d, lambda m: m["splits"].update({"../x": m["splits"].pop("val")})),
            "the split '../x' is not a valid file name",
        ),
        (lambda d: edit_manifest(d, lambda m: m["classes"].pop()), "has 3 classes but the manifest names 2"),
    ],
)
def test_damaged_data_sets_are_refused(packed, change, message):
    change(packed)
    with pytest.raises(DataError, match=message):
        ShardSet.open(packed, "train")


def test_unknown_split_and_missing_folder_are_refused(packed):
    with pytest.raises(DataError, match=r"no split 'vale' in '.*' \(did you mean 'val'\?\): it has train, val"):
        ShardSet.open(packed, "vale")
    with pytest.raises(DataError, match=r"make one with `vitpar data pack SOURCE .*nowhere`"):
        ShardSet.open(packed / "nowhere", "train")
    with pytest.raises(DataError, match="make one with"):
        ShardSet.open(packed / "dataset.json", "train")


def test_shard_lost_after_opening_is_named(packed):
    shards = ShardSet.open(packed, "val")
    assert shards.name(0).startswith("val-000000.tar/")
    with (packed / "val-000000.tar").open("r+b") as file:
        file.truncate(600)
    with pytest.raises(DataError, match=r"shard '.*val-000000.tar' was changed during use: restore it"):
        shards.read(0)
    (packed / "val-000001.tar").unlink()
    with pytest.raises(DataError, match=r"cannot read '.*val-000001.tar': No such file"):
        shards.read(8)
