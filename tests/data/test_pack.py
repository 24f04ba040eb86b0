"""Packing: images and labels are unchanged, output is deterministic, and nothing incomplete looks complete."""

import inspect
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image
from typer.testing import CliRunner

from helpers.tiny_images import CLASSES, encoded, write_classes, write_tree, write_zips
from vitpar.data.shards.pack import SKIPPED, Reencode, pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.shards.verify import verify
from vitpar.data.sources import SourceSplit, open_source
from vitpar.data.survey import survey
from vitpar.data.text.pack import SHARD_SEQUENCES
from vitpar.errors import DataError
from vitpar_cli.data import app, pack_command


def packed_labels(folder: Path) -> dict[bytes, int]:
    """Return the label of every packed image by its bytes, over all splits."""
    found = {}
    for split in ("train", "val"):
        shards = ShardSet.open(folder, split)
        found |= {shards.read(i): shards.label(i) for i in range(len(shards))}
    return found


def names_of(split: SourceSplit) -> list[str]:
    return [split.name(i) for i in range(len(split.labels))]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pack_in_part(source: Path, target: Path, **settings: Any) -> None:
    """Interrupt packing when all shards are written."""

    def interrupt(split: str, done: int, total: int) -> None:
        if split == "val" and done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, target, progress=interrupt, **settings)


def expect_same_as_new(source: Path, target: Path, **settings: Any) -> None:
    """Pack into `target`, where an interrupted run left shards, and compare with an empty folder."""
    pack(source, target, **settings)
    pack(source, target.with_name("expected"), **settings)
    assert files(target) == files(target.with_name("expected"))


@pytest.mark.parametrize("write", [write_tree, write_zips, lambda folder: write_classes(folder, 6)])
def test_images_and_labels_come_back_unchanged(tmp_path, write):
    labels = write(tmp_path / "source")
    manifest = pack(tmp_path / "source", tmp_path / "packed", shard_samples=4)
    assert packed_labels(tmp_path / "packed") == labels
    assert tuple(manifest.classes) == CLASSES
    train = manifest.splits["train"]
    assert [shard.samples for shard in train.shards][:2] == [4, 4 if train.samples > 7 else 2]


def test_webdataset_reads_the_shards(tmp_path):
    labels = write_tree(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed", shard_samples=8)
    urls = [str(path) for path in sorted((tmp_path / "packed").glob("*.tar"))]
    assert len(urls) == 5
    found = {}
    for sample in webdataset.WebDataset(urls, shardshuffle=False):
        image = sample.get("jpg") or sample["png"]
        found[image] = int(sample["cls"])
        assert Image.open(io.BytesIO(image)).format == ("JPEG" if "jpg" in sample else "PNG")
    assert found == labels


def test_training_shards_mix_classes_and_val_keeps_the_order(tmp_path):
    write_tree(tmp_path / "source", train=40, val=4)
    pack(tmp_path / "source", tmp_path / "packed", shard_samples=30)
    train = ShardSet.open(tmp_path / "packed", "train").labels
    assert all(set(train[start : start + 30]) == {0, 1, 2} for start in range(0, 120, 30))
    assert ShardSet.open(tmp_path / "packed", "val").labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_digits_are_scaled_without_loss_and_split_by_class():
    from sklearn.datasets import load_digits

    source = open_source("digits")
    assert {name: len(split.labels) for name, split in source.splits.items()} == {"train": 1437, "val": 360}
    assert np.ptp(np.bincount(source.splits["val"].labels)) <= 2
    pixels = {
        int(split.name(i).split("/")[1]): np.asarray(Image.open(io.BytesIO(split.read(i))))
        for split in source.splits.values()
        for i in range(len(split.labels))
    }
    back = np.stack([np.rint(pixels[i] * (16 / 255)) for i in range(1797)])
    assert np.array_equal(back, load_digits().images)


def test_digits_without_scikit_learn_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install -e '\.\[digits\]'"):
        open_source("digits")


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5, 0.99])
def test_carved_split_is_stratified_and_seeded(tmp_path, fraction):
    write_classes(tmp_path, 10)
    source = open_source(tmp_path, val_fraction=fraction)
    again, other = (open_source(tmp_path, val_fraction=fraction, seed=seed) for seed in (0, 1))
    train, val = source.splits["train"], source.splits["val"]
    assert np.bincount(val.labels).tolist() == [min(9, round(10 * fraction))] * 3
    assert not {*names_of(train)} & {*names_of(val)} and len(train.labels) + len(val.labels) == 30
    assert names_of(val) == names_of(again.splits["val"]) != names_of(other.splits["val"])


def test_classes_without_a_list_are_numbered(tmp_path):
    write_zips(tmp_path / "source", classes=False)
    assert open_source(tmp_path / "source").classes == ["0", "1", "2"]


def replaced(name, content=None):
    """Return a change of a source that replaces a file, or removes it if there is no content."""

    def change(folder):
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)

    return change


def flip_a_bit(folder):
    data = bytearray((folder / "val.zip").read_bytes())
    data[data.index(encoded(1001)) + 60] ^= 1
    (folder / "val.zip").write_bytes(data)


BAD = [
    # what writes the source, a change of it, settings, message
    (write_zips, replaced("train_map.txt", b"ant/0.png\t0\nbee/1.png\tx\n"), {}, r"line 2 of '.*train_map"),
    (write_zips, replaced("val_map.txt", b"ant/0.png\t3\n"), {}, r"line 1 of '.*val_map.txt' is .*t3': it needs"),
    (write_zips, replaced("val_map.txt", b"ant/0.png\t-1\n"), {}, r"line 1 of '.*val_map.txt' is .*-1': it needs"),
    (write_zips, replaced("val_map.txt", b"\nant/0.png 0\n"), {}, r"line 2 of .* is 'ant/0.png 0': it needs"),
    (write_zips, replaced("val_map.txt", b"\n"), {}, r"val_map.txt' lists no images"),
    (write_zips, replaced("val_map.txt"), {}, r"cannot read '.*val_map.txt': No such file"),
    (write_zips, replaced("val_map.txt", b"ant/9.png\t0\n"), {}, r"val.zip' has no entry 'ant/9.png', which 'val_map"),
    (write_zips, replaced("val.zip"), {}, r"cannot read '.*val.zip': No such file"),
    (write_zips, replaced("val.zip", b"PK nothing"), {}, r"val.zip' is not a valid zip file"),
    (write_zips, flip_a_bit, {}, r"cannot read entry 'bee/1.png' of '.*val.zip' .Bad CRC-32"),
    (write_tree, lambda d: (d / "train/dog").mkdir(), {}, r"'.*train/dog' holds no images: fill it"),
    (write_tree, lambda d: (d / "val/dog").mkdir(), {}, r"class folder '.*val/dog' has no counterpart in '.*train'"),
    (write_tree, replaced("train/ant/0.png", b"hello"), {}, r"'.*ant/0.png' is not a supported image type"),
    (write_tree, replaced("val/ant/0.png", encoded(1)[:20]), {}, r"ant/0.png' is damaged \(its header cannot"),
    (write_tree, lambda d: (d / "train").rename(d / "x") and (d / "train").mkdir(), {}, "train' has no class fol"),
    (write_tree, shutil.rmtree, {}, r"no folder or file '.*source' to pack: use a folder with images"),
    (write_tree, None, {"val_fraction": 0.3}, "already has a val split: remove the val fraction 0.3"),
    (write_tree, None, {"val_fraction": 1.5}, "val fraction 1.5 is out of range"),
    (write_tree, None, {"shard_samples": 0}, "shard size 0 is not a positive number"),
]


@pytest.mark.parametrize(("write", "change", "settings", "message"), BAD, ids=[row[3] for row in BAD])
def test_bad_sources_and_settings_are_refused(tmp_path, write, change, settings, message):
    write(tmp_path / "source")
    if change:
        change(tmp_path / "source")
    with pytest.raises(DataError, match=message):
        pack(tmp_path / "source", tmp_path / "packed", **settings)
    assert not (tmp_path / "packed").exists()


def test_damaged_images_are_left_out_on_request(tmp_path):
    """The packed data set is that of a source without them, and a second run reuses its shards."""
    sound = write_tree(tmp_path / "source")
    for name, content in (("train/ant/3.JPEG", b"hello"), ("val/bee/0.png", encoded(1)[:20])):
        (tmp_path / "source" / name).write_bytes(content)
    with pytest.raises(DataError, match=r"skip such files with --skip-damaged"):
        pack(tmp_path / "source", tmp_path / "packed", shard_samples=4)
    manifest = pack(tmp_path / "source", tmp_path / "packed", shard_samples=4, skip_damaged=True)
    assert (manifest.splits["train"].samples, manifest.splits["val"].samples) == (20, 8)
    lines = (tmp_path / "packed" / SKIPPED).read_text().splitlines()
    assert "train/ant/3.JPEG' is not a supported image type" in lines[0]
    assert "val/bee/0.png' is damaged" in lines[1] and len(lines) == 2
    assert not list((tmp_path / "packed").glob("*.skipped"))
    assert list(verify(tmp_path / "packed")) == []
    labels = packed_labels(tmp_path / "packed")
    assert len(labels) == 28 and labels.items() <= sound.items()


def test_a_shard_that_lacks_images_is_written_again_if_they_must_not_be_left_out(tmp_path, monkeypatch):
    write_classes(tmp_path / "source", 6)
    (tmp_path / "source/ant/0.png").write_bytes(b"hello")

    options = {"val_fraction": 0.2, "shard_samples": 4}
    pack_in_part(tmp_path / "source", tmp_path / "packed", skip_damaged=True, **options)
    with pytest.raises(DataError, match="is not a supported image type"):
        pack(tmp_path / "source", tmp_path / "packed", **options)
    # Threads may not parse literals on Python 3.11.7: numpy.load does.
    monkeypatch.delattr("numpy.load")
    pack(tmp_path / "source", tmp_path / "packed", skip_damaged=True, **options)
    assert (tmp_path / "packed" / SKIPPED).exists()


def test_a_source_without_any_image_is_refused(tmp_path):
    write_classes(tmp_path / "source", 2)
    for path in (tmp_path / "source").rglob("*.*"):
        path.write_bytes(b"hello")
    with pytest.raises(DataError, match=r"none of the . images of the split 'train' can be read"):
        pack(tmp_path / "source", tmp_path / "packed", val_fraction=0, skip_damaged=True)


def test_a_data_set_may_have_no_val_split(tmp_path):
    write_classes(tmp_path / "source", 6)
    manifest = pack(tmp_path / "source", tmp_path / "packed", val_fraction=0)
    assert list(manifest.splits) == ["train"] and manifest.splits["train"].samples == 18


def test_overwrite_replaces_only_a_packed_data_set(tmp_path):
    """A wrong path with --overwrite must not delete a user's other files."""
    write_classes(tmp_path / "source", 3)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="is not empty and not a data set"):
            pack(tmp_path / "source", tmp_path / "home", overwrite=overwrite)
    (tmp_path / "packed").mkdir()
    pack(tmp_path / "source", tmp_path / "packed", seed=1)
    shard = tmp_path / "packed" / "train-000000.tar"
    before = shard.read_bytes()
    with pytest.raises(DataError, match="is an existing data set: choose another folder, or replace it"):
        pack(tmp_path / "source", tmp_path / "packed")
    pack(tmp_path / "source", tmp_path / "packed", seed=3, overwrite=True)
    assert shard.read_bytes() != before
    assert sorted(os.listdir(tmp_path)) == ["home", "packed", "source"]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        pack(tmp_path / "source", tmp_path / "file")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_interrupted_packing_keeps_the_old_data_and_resumes(tmp_path, overwrite, workers):
    write_classes(tmp_path / "source", 6)
    pack(tmp_path / "source", tmp_path / "expected", shard_samples=2)
    if overwrite:
        pack(tmp_path / "source", tmp_path / "packed", seed=9)
    read = []

    settings = {"shard_samples": 2, "overwrite": overwrite, "workers": workers}
    pack_in_part(tmp_path / "source", tmp_path / "packed", **settings)
    assert (tmp_path / "packed").exists() == overwrite
    if overwrite:
        assert len(packed_labels(tmp_path / "packed")) == 18
    pack(tmp_path / "source", tmp_path / "packed", progress=lambda *count: read.append(count), **settings)
    assert files(tmp_path / "packed") == files(tmp_path / "expected")
    assert sorted(os.listdir(tmp_path)) == ["expected", "packed", "source"]
    assert len([split for split, *_ in read if split == "train"]) == 7, "shards that were whole are used as they are"


def test_killed_packing_leaves_no_usable_data_set_and_resumes(tmp_path):
    write_classes(tmp_path / "source", 6)
    program = """if True:
        import os, sys
        from vitpar.data.shards.pack import pack
        stop = lambda split, done, total: split == "val" and done == total and os._exit(9)
        pack(sys.argv[1], sys.argv[2], shard_samples=5, progress=stop)
    """
    arguments = [sys.executable, "-c", program, str(tmp_path / "source"), str(tmp_path / "packed")]
    assert subprocess.run(arguments, check=False).returncode == 9
    assert not (tmp_path / "packed").exists()
    leftover = next(path for path in tmp_path.iterdir() if path.name != "source")
    with pytest.raises(DataError, match="no data set"):
        ShardSet.open(leftover, "train")
    expect_same_as_new(tmp_path / "source", tmp_path / "packed", shard_samples=5)
    assert not leftover.exists()


def test_concurrent_packing_into_one_folder_is_refused(tmp_path):
    write_classes(tmp_path / "source", 6)

    def again(split: str, done: int, total: int) -> None:
        with pytest.raises(DataError, match="another process is packing into"):
            pack(tmp_path / "source", tmp_path / "packed")

    pack(tmp_path / "source", tmp_path / "packed", progress=again)


def test_full_disk_is_reported_and_leaves_no_data_set(tmp_path):
    write_classes(tmp_path / "source", 6)
    program = """if True:
        import resource, sys
        from vitpar.data.shards.pack import pack
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            pack(sys.argv[1], sys.argv[2], shard_samples=int(sys.argv[3]))
        except Exception as error:
            print(type(error).__name__, error)
    """
    arguments = [sys.executable, "-c", program, str(tmp_path / "source"), str(tmp_path / "packed"), "50"]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("DataError cannot write")
    assert "File too large; rerun the command to resume" in done.stdout
    assert not (tmp_path / "packed").exists()


def test_destination_filled_by_others_is_left_alone(tmp_path):
    write_classes(tmp_path / "source", 6)

    def fill(split: str, done: int, total: int) -> None:
        (tmp_path / "packed").mkdir(exist_ok=True)
        (tmp_path / "packed" / "thesis.txt").write_text("years of work")

    with pytest.raises(DataError, match="is not empty and not a data set"):
        pack(tmp_path / "source", tmp_path / "packed", progress=fill)
    assert (tmp_path / "packed" / "thesis.txt").read_text() == "years of work"


def test_leftovers_of_another_source_are_not_used(tmp_path):
    """This holds even if the other source has the same names and labels."""
    for name, first in (("a", 0), ("b", 500)):
        write_zips(tmp_path / name, first=first)
    pack_in_part(tmp_path / "a", tmp_path / "packed")
    expect_same_as_new(tmp_path / "b", tmp_path / "packed")


@pytest.mark.parametrize("quality", [50, 95])
def test_short_side_reencodes_large_images(tmp_path, quality):
    write_classes(tmp_path / "source", 3)
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "source" / "ant" / "0.png")
    pack(tmp_path / "source", tmp_path / "packed", reencode=Reencode(64, quality))
    sizes = {}
    for split in ("train", "val"):
        shards = ShardSet.open(tmp_path / "packed", split)
        for i in range(len(shards)):
            image = Image.open(io.BytesIO(shards.read(i)))
            sizes[image.size] = image.format, len(shards.read(i))
    assert set(sizes) == {(85, 64), (12, 10)} and sizes[85, 64][0] == "JPEG"
    with pytest.raises(DataError, match="--quality 50 requires --short-side"):
        words = ["pack", str(tmp_path / "source"), str(tmp_path / "other"), "--quality", "50"]
        CliRunner().invoke(app, words, catch_exceptions=False)
    with pytest.raises(DataError, match="JPEG quality 0 is out of range"):
        Reencode(64, 0)


def test_pack_and_info_commands_describe_the_data(tmp_path):
    write_tree(tmp_path / "source")
    done = CliRunner().invoke(app, ["pack", str(tmp_path / "source"), str(tmp_path / "packed"), "--shard-samples", "5"])
    assert done.exit_code == 0 and "train" in done.output and "bee" in done.output
    shown = CliRunner().invoke(app, ["info", str(tmp_path / "packed"), "--json"])
    assert json.loads(shown.output) == survey(tmp_path / "packed")
    assert json.loads(shown.output)["splits"]["val"] == {
        "samples": 9,
        "shards": 2,
        "bytes": sum(path.stat().st_size for path in (tmp_path / "packed").glob("val-*.tar")),
        "per_class": [3, 3, 3],
        "fingerprint": ShardSet.open(tmp_path / "packed", "val").fingerprint,
        "width": [12] * 5,
        "height": [10] * 5,
        "image_bytes": json.loads(shown.output)["splits"]["val"]["image_bytes"],
    }
    default = inspect.signature(pack).parameters["shard_samples"].default
    option = inspect.signature(pack_command).parameters["shard_samples"].annotation.__metadata__[0]
    assert option.help.endswith(f"[default: {default}; text: {SHARD_SEQUENCES}]")
    again = CliRunner().invoke(app, ["pack", str(tmp_path / "source"), str(tmp_path / "packed")])
    assert isinstance(again.exception, DataError)


@pytest.mark.parametrize("side", [None, 4])
def test_images_are_decoded_unless_asked_not_to(side, tmp_path):
    """A truncated image has an intact header."""
    write_classes(tmp_path / "source", 6)
    truncated = tmp_path / "source/ant/0.png"
    truncated.write_bytes(truncated.read_bytes()[:-30])
    options = {"val_fraction": 0, "reencode": side and Reencode(side)}
    with pytest.raises(DataError, match=r"ant/0.png' is damaged \(it cannot be decoded .*--skip-damaged"):
        pack(tmp_path / "source", tmp_path / "packed", **options)
    whole = pack(tmp_path / "source", tmp_path / "packed", decode_images=False, val_fraction=0)
    found = pack(tmp_path / "source", tmp_path / "packed", skip_damaged=True, overwrite=True, **options)
    assert found.splits["train"].samples == whole.splits["train"].samples - 1
