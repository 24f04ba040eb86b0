"""Parquet files with columns of unexpected types, without data, or with very much data."""

from __future__ import annotations

import functools
import io
import json
import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from fuzzing.seeds import png

ROWS = 5
KNOWN = {"info": {"features": {"label": {"names": ["class0", "class1", "class2"], "_type": "ClassLabel"}}}}
METADATA = (
    "[" * 100_000,
    "{}",
    '{"info":1}',
    '{"info":{"features":{"label":{"names":[[]]}}}}',
    "\\",
    '{"info":' * 5_000,
)


def written(table: Any, compression: str = "snappy") -> bytes:
    """Return the table as a Parquet file with small row groups."""
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, compression=compression, row_group_size=max(2, len(table) // 8))
    return file.getvalue()


def images(numbers: Iterable[int], compression: str = "snappy", known: bool = True, **columns: Any) -> bytes:
    """Return a Parquet file of images and labels in the layout of Hugging Face.

    known: whether the metadata has the names of classes. columns: replace columns.
    """
    import pyarrow

    rows = list(numbers)
    column = pyarrow.array([{"bytes": png(i), "path": f"{i}.png"} for i in rows], _image())
    table = pyarrow.table({"image": column, "label": pyarrow.array([i % 3 for i in rows]), **columns})
    return written(
        table.replace_schema_metadata({b"huggingface": json.dumps(KNOWN).encode()} if known else None), compression
    )


def _image() -> Any:
    import pyarrow

    return pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


@functools.cache
def _labels(kind: str) -> Any:
    import pyarrow

    made = {
        "text": lambda: pyarrow.array(["a"] * ROWS),
        "fractions": lambda: pyarrow.array([0.5, float("nan"), float("inf"), 1e300, -1.0]),
        "nulls": lambda: pyarrow.nulls(ROWS),
        "some nulls": lambda: pyarrow.array([0, None, 1, None, 2]),
        "lists": lambda: pyarrow.array([[1]] * ROWS),
        "large": lambda: pyarrow.array([0, 1 << 40, -1, 1 << 62, 2]),
        "negative": lambda: pyarrow.array([-1] * ROWS),
        "many classes": lambda: pyarrow.array([0, 1, 2, 3, 2_000_000]),
        "truth": lambda: pyarrow.array([True, False] * 2 + [True]),
        "unsigned": lambda: pyarrow.array([(1 << 64) - 1] * ROWS, pyarrow.uint64()),
        "times": lambda: pyarrow.array([1] * ROWS, pyarrow.timestamp("ns")),
        "decimals": lambda: pyarrow.array([1] * ROWS, pyarrow.int64()).cast(pyarrow.decimal128(25)),
        "dictionary": lambda: pyarrow.array(["a", "b", "c", "a", "b"]).dictionary_encode(),
        "structs": lambda: pyarrow.array([{"bytes": b"x", "path": None}] * ROWS, _image()),
    }
    return made[kind]() if kind else sorted(made)


@functools.cache
def _images(kind: str) -> Any:
    import pyarrow

    one = {"bytes": png(0), "path": None}
    made = {
        "text": lambda: pyarrow.array(["a"] * ROWS),
        "no bytes": lambda: pyarrow.array([{"bytes": None, "path": "/etc/passwd"}] * ROWS, _image()),
        "nulls": lambda: pyarrow.array([None] * ROWS, _image()),
        "text bytes": lambda: pyarrow.array([{"bytes": "x"}] * ROWS, pyarrow.struct([("bytes", pyarrow.string())])),
        "lists": lambda: pyarrow.array([[one]] * ROWS, pyarrow.list_(_image())),
        "whole numbers": lambda: pyarrow.array([{"bytes": 1}] * ROWS, pyarrow.struct([("bytes", pyarrow.int64())])),
        "nested": lambda: pyarrow.array([{"a": one}] * ROWS, pyarrow.struct([("a", _image())])),
        "plain": lambda: pyarrow.array([png(0)] * ROWS),
    }
    return made[kind]() if kind else sorted(made)


@functools.cache
def bomb(kind: str) -> bytes:
    """Return a small file with very much data.

    kind: `images` for large images of zeros, `rows` for many empty rows, else large images in a single row group.
    """
    import pyarrow

    if kind == "images":
        column = pyarrow.array([{"bytes": bytes(60 << 20), "path": None}] * ROWS, _image())
        return images(range(ROWS), "zstd", image=column)
    if kind == "rows":
        count = 10_000_000
        table = pyarrow.table({"image": pyarrow.nulls(count, _image()), "label": np.zeros(count, np.int64)})
        return written(table, "zstd")
    file, count = io.BytesIO(), 40
    column = pyarrow.array([{"bytes": bytes(40 << 20), "path": None}], _image())
    table = pyarrow.table(
        {"image": pyarrow.concat_arrays([column]).take(pyarrow.array([0] * count)), "label": [0] * count}
    )
    pyarrow.parquet.write_table(table, file, compression="zstd", row_group_size=count)
    return file.getvalue()


def attack(draw: random.Random) -> tuple[bytes, str]:
    """Return a hostile Parquet file and a description."""
    import pyarrow

    kind = draw.choice(("label", "label", "label", "image", "image", "bomb", "names", "metadata"))
    match kind:
        case "label":
            which = draw.choice(_labels(""))
            data = images(range(ROWS), label=_labels(which))
        case "image":
            which = draw.choice(_images(""))
            data = images(range(ROWS), image=_images(which))
        case "bomb":
            which = draw.choice(("images", "rows", "a group"))
            data = bomb(which)
        case "names":
            which = draw.choice(("", "label", "x" * 100_000, "\x1b[31m"))
            data = written(pyarrow.table({which: [1], draw.choice(("image", "y")): [b"x"]}))
        case _:
            which = draw.choice(METADATA)
            table = pyarrow.table({"image": _images("no bytes"), "label": [0, 1, 2, 0, 1]})
            data = written(table.replace_schema_metadata({b"huggingface": which.encode()}))
    return data, f"{kind} {which[:30]!a}"
