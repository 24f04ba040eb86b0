"""Indices of checkpoints of strangers: small files that claim much, and what is no file."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from vitpar.checkpoint.index import INDEX, Index, StoredFile, StoredTensor, crc32, damage, other_size, read_index
from vitpar.checkpoint.reader import load_tensors
from vitpar.errors import CheckpointError
from vitpar.limits import MAX_INDEX_BYTES, MAX_INT64, MAX_QUOTED_CHARS

pytestmark = pytest.mark.timeout(30)
ONE = {"dtype": "float32", "shape": [2], "parts": [[0, [0], [2]]]}
FILE = {"bytes": 1_000, "crc32": 1}


def indexed(folder: Path, **said: Any) -> Path:
    whole = {"shards": ["a"], "files": {"a": FILE}, "tensors": {"x": ONE}} | said
    with suppress(ValueError):  # where it can be read at all, it was not changed since
        whole = {"crc32": Index.model_validate(whole).checksum} | whole
    (folder / INDEX).write_text(json.dumps(whole))
    return folder


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_index(folder)
    said = str(caught.value)
    assert len(said) < 2 * MAX_QUOTED_CHARS + 300 and "\n" not in said


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"tensors": {"x": ONE | {"shape": [1] * 32, "parts": [[0, [0] * 32, [1] * 32]]}}},
            "x: shape: .*at most 4 items",
        ),
        ({"tensors": {"x": ONE | {"shape": [1] * 10**6}}}, "x: shape: .*at most 4 items"),
        ({"tensors": {"x": ONE | {"parts": [[0, [0] * 5, [1] * 5]]}}}, "x: parts.0.1: .*at most 4 items"),
        ({"tensors": {"x": ONE | {"parts": [[0, [0], [1]]] * 65_537}}}, "x: parts: .*at most 65536 items"),
        ({"tensors": {"x": ONE | {"parts": [[-1, [0], [2]]]}}}, "x: parts.0.0: Input should be greater"),
        ({"tensors": {"x": ONE | {"shape": [MAX_INT64 + 1]}}}, "x: shape.0: Input should be less"),
        ({"tensors": {"x": ONE | {"shape": [10**4_000]}}}, "x: shape.0: "),
        ({"tensors": {"x": ONE | {"shape": [-1]}}}, "x: shape.0: Input should be greater"),
        ({"tensors": {"x": ONE | {"dtype": "x" * 10**6}}}, "x: dtype: Input should be"),
        ({"tensors": {"x": ONE | {f"k{index}": 1 for index in range(10**5)}}}, "x: unknown key 'k0'"),
        ({"tensors": {str(index): 1 for index in range(10**5)}}, "tensors: 0: Input should be"),
        ({"tensors": {"y" * 10**6: ONE | {"shape": [3]}}}, "has parts of y{198}… that do not make it up"),
        ({"tensors": 3}, "tensors: Input should be"),
        ({"shards": [1] * 10**6}, "shards.0: Input should be a valid string"),
        ({"shards": ["../" + "y" * 10**6]}, "names '../y+…, which cannot be in it"),
        ({"files": {str(index): 1 for index in range(10**5)}}, "files: 0: Input should be"),
        ({"files": {"a": FILE | {"bytes": 10**4_000}}}, "files: a: bytes: "),
        ({f"k{index}": 1 for index in range(10**5)}, "unknown key 'k0'"),
        ({"crc32": 1}, "is not what was written"),
    ],
)
def test_an_index_that_claims_too_much(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(indexed(tmp_path, **said), message)


@pytest.mark.parametrize("content", [b"[" * 10**6, b"9" * 5_000, b"\xff", b"", b"[1]", b"3", b'{"shards": '])
def test_what_is_no_index(content: bytes, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(content)
    refused(tmp_path, "index.json of .* cannot be read: .*: use another checkpoint")


def test_what_is_no_file(tmp_path: Path) -> None:
    refused(tmp_path, "is no checkpoint")
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    refused(tmp_path, "cannot be read: it has more than 268,435,456 bytes")
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (tmp_path / INDEX).unlink()
        make(tmp_path / INDEX)
        refused(tmp_path, "cannot be read: it is not a regular file")


def test_shards_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    known = StoredFile(bytes=0, crc32=0)
    assert other_size(tmp_path / "a", known) == damage(tmp_path, {"a": known}) == "a: it is not a regular file"
    with pytest.raises(OSError, match="it is not a regular file"):
        crc32(tmp_path / "a")
    index = Index(shards=["a"], files={"a": known}, tensors={"x": StoredTensor(**ONE)})
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        load_tensors(tmp_path, {"x": torch.empty(2)}, index)


def test_parts_of_a_thousand_ranks_are_read(tmp_path: Path) -> None:
    parts = [(rank, (8 * rank, 0, 0, 0), (8, 3, 2, 2)) for rank in range(1_000)]
    tensor = StoredTensor(dtype="bfloat16", shape=(8_000, 3, 2, 2), parts=parts)
    shards = [f"{rank}.safetensors" for rank in range(1_000)]
    files = {name: StoredFile(bytes=10**6, crc32=7) for name in shards}
    index = Index(shards=shards, files=files, tensors={f"model.{number}": tensor for number in range(20)})
    index.crc32 = index.checksum
    (tmp_path / INDEX).write_text(index.model_dump_json())
    assert read_index(tmp_path) == index
    assert not tensor.model_copy(update={"parts": [*parts[:-1], parts[0]]}).is_filled(1_000)
