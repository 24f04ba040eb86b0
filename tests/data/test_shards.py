"""Index of a packed data set: random access, and refusal of everything that does not match."""

import hashlib
import json
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from helpers.tiny_images import CLASSES, write_tree
from vitpar.data.shards import manifest
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError


@pytest.fixture
def packed(tmp_path):
    write_tree(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed", shard_samples=8)
    return tmp_path / "packed"


def members(path):
    """Return (name without extension, extension, bytes) of every member of a tar file."""
    with tarfile.open(path) as tar:
        return [(*m.name.split("."), tar.extractfile(m).read()) for m in tar]


def test_an_index_that_is_cut_while_it_is_used_still_serves(tmp_path):
    write_tree(tmp_path / "source", train=3, val=3)
    pack(tmp_path / "source", tmp_path / "packed")
    data = ShardSet.open(tmp_path / "packed", "train")
    (tmp_path / "packed" / "train.index.npy").write_bytes(b"")
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
