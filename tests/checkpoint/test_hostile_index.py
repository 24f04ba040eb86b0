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
from vitpar.checkpoint.index import INDEX, Index, StoredFile, read_index
from vitpar.errors import CheckpointError, DataError
from vitpar.limits import MAX_QUOTED_CHARS
from vitpar.weights.folder import open_weights

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
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        make(tmp_path / INDEX)
        refused(tmp_path, "cannot be read: it is not a regular file")
        (tmp_path / INDEX).unlink()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, ranks: Callable[[int], RankPool]) -> Callable[[Path], Path]:
    """Return a function that copies a checkpoint of step 1 to a new folder."""
    place = tmp_path_factory.mktemp("trained")
    recipe = recipe_of(pack_small(place), "dp1", **{"train.steps": 1, "checkpoint.every": 1})
    ranks(1).run(train, recipe, place / "run")
    return lambda folder: Path(shutil.copytree(place / "run" / "checkpoints" / "step_1", folder / "step_1"))


def test_index_that_does_not_parse_is_refused(tmp_path: Path) -> None:
    for said, message in (
        ({"tensors": {"x": ONE | {"parts": [[-1, [0], [2]]]}}}, "tensors.x.parts.0.0: Input should be greater"),
        ({"tensors": {"x": ONE | {"dtype": "x" * 10**6}}}, "tensors.x.dtype: Input should be"),
        ({"tensors": {"y" * 10**6: ONE | {"shape": [3]}}}, "has parts that do not fill y{198}…"),
        ({"tensors": {"x": ONE | {"parts": [[5, [0], [2]]]}}}, "has parts that do not fill x"),
        ({"shards": ["../y"]}, "lists '../y', which is not one of its files"),
        ({"crc32": 1}, "has a wrong checksum"),
    ):
        refused(indexed(tmp_path, **said), message)
    for content in (b"[" * 10**6, b"\xff", b'{"shards": '):
        (tmp_path / INDEX).write_bytes(content)
        refused(tmp_path, "index.json of .* cannot be read: .*: use another checkpoint")


def test_config_of_a_checkpoint_is_compared_with_its_index(checkpoint: Callable[[Path], Path], tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert open_weights(path).config.embed_dim == config["embed_dim"]
    text = json.dumps(config | {"embed_dim": 10**5, "num_heads": HEADS})
    (path / "config.json").write_text(text)

    def known(index: Index) -> None:
        index.files["config.json"] = StoredFile(bytes=len(text), crc32=zlib.crc32(text.encode()))

    changed(path, known)
    with pytest.raises(DataError, match=r"has shape \[.*\] but the model has \[.*100000"):
        open_weights(path)
