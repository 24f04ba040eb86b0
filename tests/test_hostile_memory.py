"""Memory that hostile files make their readers take, in a fork: at most half a gigabyte above what it had."""

import gzip
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from helpers.hostile_files import write_tar
from helpers.imagenet_archives import meta, write_imagenet, write_kit
from helpers.ranks import in_forks
from helpers.tiny_images import write_zips
from vitpar.checkpoint.index import INDEX, read_index
from vitpar.data.shards.manifest import MANIFEST, read_manifest
from vitpar.data.sources import open_source
from vitpar.data.text import open_tokenizer
from vitpar.data.text.sources import open_text
from vitpar.errors import UserError
from vitpar.weights.sources import open_source as open_weights

MIB = 1 << 20
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def parquet(place: Path, image: bytes, rows: int, group: int, **metadata: bytes) -> None:
    """Write a Parquet file that has one image `rows` times."""
    images = pa.array([{"bytes": image, "path": None}], IMAGE).take(pa.array(np.zeros(rows, np.int64)))
    table = pa.table({"image": images, "label": np.arange(rows) % 2}).replace_schema_metadata(metadata)
    pq.write_table(table, place / "train.parquet", compression="zstd", row_group_size=group)


def safetensors(place: Path, header: bytes) -> None:
    (place / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def pickled(place: Path, content: bytes) -> None:
    """Write a file of torch.save with `content` as its pickle."""
    torch.save({}, place / "w.pt")
    with zipfile.ZipFile(place / "w.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(place / "w.pt", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, content if name.endswith("data.pkl") else data)


def kit(place: Path, truth: bytes) -> None:
    write_imagenet(place)
    write_kit(place, meta(), truth)


def cifar(place: Path, content: bytes) -> None:
    write_tar(place / "cifar.tar", *((name, content) for name in ("train", "test", "meta")))


def listing(place: Path, entries: int) -> None:
    """Write a zip file with a listing of `entries` empty members."""
    write_zips(place / "in")
    one = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 0, 20, *[0] * 8, 2, *[0] * 6) + b"ab"
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(one) * entries, 0, 0)
    (place / "in" / "train.zip").write_bytes(one * entries + end)


def text(name: str, content: bytes, place: Path) -> None:
    (place / name).write_bytes(content)


def parquet_text(place: Path, text: str, rows: int) -> None:
    """Write a Parquet file that has one text `rows` times."""
    texts = pa.array([text]).take(pa.array(np.zeros(rows, np.int64)))
    pq.write_table(pa.table({"text": texts}), place / "t.parquet", compression="zstd", row_group_size=8)


def read_text(path: Path) -> None:
    """Read at most 64 MiB of the text at `path`."""
    read = 0
    for piece in open_text(path).pieces("train"):
        read += len(piece.text)
        if read > 64 * MIB:
            return


TOKENIZER = b'{"version":"1.0","model":["' + b"x" * (55 * MIB) + b'"' + b',"a"' * (2 * MIB - 9) + b"]}"
"""Tokenizer that is a long text and a list."""
OBJECTS = b"\x80\2(" + b"]" * (12 * MIB) + b"t."
"""Pickle that makes a list for each byte."""
COPIES = b"\x80\2c_codecs\nencode\nq\0X" + struct.pack("<I", 2 * MIB) + b"abc " * (MIB // 2)
COPIES += b"X\6\0\0\0latin1\x86q\1(" + b"h\0h\1R" * 400 + b"t."
"""Pickle that copies a text for each five bytes."""
CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any], str]] = {
    "repeated image": (partial(parquet, image=bytes(8 * MIB), rows=96, group=8), open_source, ""),
    "many rows": (partial(parquet, image=b"x", rows=1 << 21, group=1 << 20), open_source, ""),
    "long metadata": (
        partial(parquet, image=b"x", rows=2, group=2, huggingface=b"[" + b"[]," * (8 * MIB) + b"0]"),
        open_source,
        "",
    ),
    "development kit": (partial(kit, truth=b"1\n" * (16 * MIB)), open_source, ""),
    "shape of a tensor": (
        partial(safetensors, header=b'{"a":{"dtype":"F32","shape":[' + b"0," * (30 * MIB) + b"0]}}"),
        open_weights,
        "w.safetensors",
    ),
    "instructions of a pickle": (
        partial(pickled, content=OBJECTS),
        open_weights,
        "w.pt",
    ),
    "copies in a pickle": (
        partial(pickled, content=COPIES),
        open_weights,
        "w.pt",
    ),
    "copies in a file of CIFAR": (
        partial(cifar, content=COPIES),
        open_source,
        "cifar.tar",
    ),
    "instructions in a file of CIFAR": (
        partial(cifar, content=OBJECTS),
        open_source,
        "cifar.tar",
    ),
    "listing of a zip file": (partial(listing, entries=2_000_000), open_source, "in"),
    "index": (partial(text, INDEX, b"[" + b"{}," * (8 * MIB) + b"0]"), read_index, ""),
    "tokenizer": (partial(text, "t.json", TOKENIZER), lambda path: open_tokenizer(str(path)), "t.json"),
    "line of JSON": (partial(text, "t.jsonl", b'{"x":[' + b"{}," * (4 * MIB - 8) + b"0]}"), read_text, "t.jsonl"),
    "repeated text": (partial(parquet_text, text="x" * (8 * MIB), rows=96), read_text, "t.parquet"),
    "unpacked text": (lambda place: text("t.txt.gz", gzip.compress(bytes(512 * MIB), 1), place), read_text, "t.txt.gz"),
    "manifest": (partial(text, MANIFEST, b'{"x":[' + b"{}," * (8 * MIB) + b"0]}"), read_manifest, ""),
}
"""Function that writes the file, the reader, and the name that it is given."""


def memory(key: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def grown(case: str, place: Path) -> int:
    """Return the largest growth of resident memory while a file is read."""
    _, read, name = CASES[case]
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = memory("VmRSS")
    try:
        found = read(place / name)
        for split in getattr(found, "splits", {}).values():
            for i in range(0, len(split.labels), max(1, len(split.labels) // 16)):
                split.read(i)
    except UserError:
        pass
    return memory("VmHWM") - before


@pytest.mark.parametrize("case", CASES)
def test_hostile_files_take_little_memory(case: str, tmp_path: Path) -> None:
    CASES[case][0](tmp_path)
    assert in_forks(grown, [{}], case, tmp_path)[0] < 512 * MIB
