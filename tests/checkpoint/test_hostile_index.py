"""Untrusted checkpoint indexes: false claims, and paths that are not regular files."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.foreign_weights import HEADS
from helpers.ranks import RankPool
from helpers.small_data import pack_small
from helpers.trained import changed, recipe_of, train
from vitpar.checkpoint.folder import Checkpoint
from vitpar.checkpoint.index import INDEX, Index, StoredFile, StoredTensor, read_index
from vitpar.checkpoint.reader import read_whole
from vitpar.errors import CheckpointError, DataError
from vitpar.limits import MAX_INDEX_BYTES, MAX_QUOTED_CHARS
from vitpar.weights.folder import read_config

pytestmark = pytest.mark.timeout(30)
ONE = {"dtype": "float32", "shape": [2], "parts": [[0, [0], [2]]]}
FILE = {"bytes": 1_000, "crc32": 1}


def indexed(folder: Path, **said: Any) -> Path:
    whole = {"shards": ["a"], "files": {"a": FILE}, "tensors": {"x": ONE}} | said
    with suppress(ValueError):  # give a readable index a valid checksum, so that it is not refused for that
        whole = {"crc32": Index.model_validate(whole).checksum} | whole
    (folder / INDEX).write_text(json.dumps(whole))
    return folder


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_index(folder)
    said = str(caught.value)
    assert len(said) < 2 * MAX_QUOTED_CHARS + 300 and "\n" not in said


def test_index_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "is not a checkpoint")
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    refused(tmp_path, "cannot be read: it has more than 268,435,456 bytes")
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (tmp_path / INDEX).unlink()
        make(tmp_path / INDEX)
        refused(tmp_path, "cannot be read: it is not a regular file")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, ranks: Callable[[int], RankPool]) -> Callable[[Path], Path]:
    """Return a function that copies a checkpoint of step 1 to a new folder."""
    place = tmp_path_factory.mktemp("trained")
    recipe = recipe_of(pack_small(place), "dp1", **{"train.steps": 1, "checkpoint.every": 1})
    ranks(1).run(train, recipe, place / "run")
    return lambda folder: Path(shutil.copytree(place / "run" / "checkpoints" / "step_1", folder / "step_1"))


BIAS = "model.head.fc.bias"  # shape (7,): one per class


def test_index_that_does_not_parse_is_refused(tmp_path: Path) -> None:
    for said, message in (
        ({"tensors": {"x": ONE | {"parts": [[-1, [0], [2]]]}}}, "tensors.x.parts.0.0: Input should be greater"),
        ({"tensors": {"x": ONE | {"dtype": "x" * 10**6}}}, "tensors.x.dtype: Input should be"),
        ({"tensors": {"y" * 10**6: ONE | {"shape": [3]}}}, "has parts that do not fill y{198}…"),
        ({"shards": ["../y"]}, "lists '../y', which is not one of its files"),
        ({"crc32": 1}, "has a wrong checksum"),
    ):
        refused(indexed(tmp_path, **said), message)
    for content in (b"[" * 10**6, b"\xff", b'{"shards": '):
        (tmp_path / INDEX).write_bytes(content)
        refused(tmp_path, "index.json of .* cannot be read: .*: use another checkpoint")


def with_parts(*parts: Any, shape: tuple[int, ...] = (7,)) -> Callable[[Index], None]:
    def change(index: Index) -> None:
        index.tensors[BIAS] = StoredTensor(dtype="float32", shape=shape, parts=list(parts))

    return change


FALSE: list[tuple[Callable[[Index], Any], str]] = [
    (with_parts((0, (0,), (4,)), (0, (3,), (3,))), "do not fill"),  # overlap at 3, a hole at 6
    (with_parts((0, (0,), (10**12,)), shape=(10**12,)), "bytes of tensors in .*which has"),
    (with_parts((5, (0,), (7,))), "do not fill"),
    (lambda index: index.shards.append(index.shards[0]), "lists a file twice"),
]


def test_index_with_false_claims_is_refused(checkpoint: Callable[[Path], Path], tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    before = (path / INDEX).read_text()
    for number, (change, message) in enumerate(FALSE):
        (path / INDEX).write_text(before)
        changed(path, change)
        with pytest.raises(CheckpointError, match=message):
            read_index(path)
            raise AssertionError(f"row {number} was accepted")


def test_tensor_of_many_boxes_is_recognised_as_complete() -> None:
    boxes = [(0, (2 * i, 3 * j), (2, 3)) for i in range(2) for j in range(3)]
    whole = StoredTensor(dtype="float32", shape=(4, 9), parts=boxes)
    assert whole.is_filled(1)
    assert not whole.model_copy(update={"parts": [*boxes[:-1], boxes[0]]}).is_filled(1)
    assert StoredTensor(dtype="float32", shape=(), parts=[(0, (), ())]).is_filled(1)
    empty = StoredTensor(dtype="float32", shape=(0, 4), parts=[(0, (0, 0), (0, 4))])
    assert empty.is_filled(1)


def test_file_sizes_are_checked_before_allocation(checkpoint: Callable[[Path], Path], tmp_path: Path) -> None:
    path = checkpoint(tmp_path)

    def huge(index: Index) -> None:
        index.files[index.shards[0]] = StoredFile(bytes=10**16, crc32=0)
        with_parts((0, (0,), (10**12,)), shape=(10**12,))(index)

    changed(path, huge)
    for look in (lambda: read_whole(Checkpoint.open(path), BIAS), lambda: read_config(path)):
        with pytest.raises(CheckpointError, match="bytes instead of 10,000,000,000,000,000"):
            look()


def test_config_of_a_checkpoint_is_compared_with_its_index(checkpoint: Callable[[Path], Path], tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert read_config(path).embed_dim == config["embed_dim"]
    text = json.dumps(config | {"embed_dim": 10**5, "num_heads": HEADS})
    (path / "config.json").write_text(text)

    def known(index: Index) -> None:
        index.files["config.json"] = StoredFile(bytes=len(text), crc32=zlib.crc32(text.encode()))

    changed(path, known)
    with pytest.raises(DataError, match=r"has shape \[.*\] but the model has \[.*100000"):
        read_config(path)
