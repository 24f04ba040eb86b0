"""The ILSVRC2012 archives: packed with one command, and refused if damaged."""

import json
import tarfile
from pathlib import Path

import pytest

from helpers.archives import GROUP, SYNSETS, VAL, VAL_ORDER, meta, tar, write_imagenet, write_kit
from helpers.command_line import run
from helpers.tiny_images import encoded
from vitpar.data.shards.index import index
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.shards.verify import verify
from vitpar.data.sources import open_source
from vitpar.errors import DataError

CLASSES = sorted(SYNSETS.values())
TRUTH = "".join(f"{number}\n" for number in VAL).encode()


@pytest.mark.parametrize("compressed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_imagenet_archives_are_packed_with_one_command(tmp_path: Path, compressed: bool) -> None:
    write_imagenet(tmp_path / "source", compressed=compressed)
    done = run(tmp_path, ["data", "pack", "source", "packed"])
    assert done.returncode == 0, done.stderr
    packed = json.loads((tmp_path / "packed" / "dataset.json").read_text())
    assert packed["classes"] == [synset for synset, _ in CLASSES]
    assert packed["class_names"] == [words for _, words in CLASSES]
    train, val = (ShardSet.open(tmp_path / "packed", split) for split in ("train", "val"))
    expected = {encoded(10 * number + i): synset for number, (synset, _) in SYNSETS.items() for i in range(4)}
    assert {train.read(i): packed["classes"][train.label(i)] for i in range(len(train))} == expected
    shown = [(val.read(i), packed["classes"][val.label(i)]) for i in range(len(val))]
    assert shown == [(encoded(50 + i), SYNSETS[VAL[i]][0]) for i in VAL_ORDER]
    assert not list(verify(tmp_path / "packed"))
    assert "tench, Tinca tinca" in done.stdout and GROUP[1] not in done.stdout
    index(tmp_path / "packed")
    assert json.loads((tmp_path / "packed" / "dataset.json").read_text()) == packed


@pytest.mark.parametrize("missing", ["ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"])
def test_missing_archive_is_named(tmp_path: Path, missing: str) -> None:
    write_imagenet(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(DataError, match=f"has no {missing}: put ImageNet's three archives into one folder"):
        open_source(tmp_path)


def too_long() -> bytes:
    """Return the tar file of a class whose image claims more bytes than the archive has."""
    inner = bytearray(tar([("a.JPEG", b"x" * 600)]))
    block = tarfile.TarInfo("a.JPEG")
    block.size = 1 << 20
    inner[:512] = block.tobuf(tarfile.USTAR_FORMAT)
    return bytes(inner)


TENCH = "n01440764.tar"
MEMBERS = [
    ([(TENCH, b"no tar file" * 100)], "not a valid tar file"),
    ([(TENCH, tar([("a.JPEG", b"x")])[:700])], "not a valid tar file"),
    ([(TENCH, too_long()), ("x", bytes(1 << 21))], "not a valid tar file"),
    ([("n99999999.tar", tar([("a.JPEG", b"x")]))], "'n99999999.tar' is not the tar file of a class"),
    ([(TENCH, tar([("a.JPEG", b"x")]))], "has no images of n02100735"),
    ([(TENCH, tar([("a.JPEG", b"")]))], "'a.JPEG' is not a file, or is empty"),
    ([(TENCH, tar([("a.JPEG", b"x")]))] * 2, "or occurs twice"),
]
"""Members of the archive of training images."""
KITS = [
    (meta(), TRUTH[:-2], "does not have the"),
    (meta(), TRUTH + b"1\n", "does not have the"),
    (meta(), b"9" + TRUTH[1:], "cannot be used"),
    (meta(WNID="n02100735"), TRUTH, "meta.mat .* cannot be used"),
    (meta(num_children="x"), TRUTH, "meta.mat .* cannot be used"),
    (meta()[:-5], TRUTH, "meta.mat .* cannot be used"),
]
"""Tables of synsets, and lists of validation classes."""


@pytest.mark.parametrize(("members", "message"), MEMBERS)
def test_invalid_train_archives_are_refused(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    write_imagenet(tmp_path)
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(tar(members))
    with pytest.raises(DataError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize(("table", "truth", "message"), KITS)
def test_invalid_development_kits_are_refused(tmp_path: Path, table: bytes, truth: bytes, message: str) -> None:
    write_imagenet(tmp_path)
    write_kit(tmp_path, table, truth)
    with pytest.raises(DataError, match=message):
        open_source(tmp_path)


def test_shrunken_archive_is_detected(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    source = open_source(tmp_path)
    path = tmp_path / "ILSVRC2012_img_train.tar"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match="has shrunk"):
        source.splits["train"].read(len(source.splits["train"].labels) - 1)
