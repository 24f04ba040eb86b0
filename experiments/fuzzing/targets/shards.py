"""Targets: tar files of other tools, packed data sets that were changed, and their index."""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuzzing import oracle
from fuzzing.attacks import tars
from fuzzing.attacks.jsons import json_attack
from fuzzing.seeds import Members, samples, tar
from fuzzing.target import Case, Files, FileTarget, read_folder, tolerated
from vitpar.data import EvalLoader, EvalTransform, Labels, ShardSet, index, pack, verify

SIDE = 8


def read_all(folder: Path, split: str) -> tuple[list[bytes], list[int]]:
    """Return the images and labels of a split; also reads the names of samples."""
    shards = ShardSet.open(folder, split)
    images = [shards.read(i) for i in range(len(shards))]
    for i in range(len(shards)):
        shards.name(i)
    return images, [shards.label(i) for i in range(len(shards))]


def loaded(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels and labels of a split, loaded as for an evaluation."""
    loader = EvalLoader(ShardSet.open(folder, split), EvalTransform(SIDE), batch_size=4, workers=0)
    batches = list(loader)
    return torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])


class ForeignShards(FileTarget):
    """Tar files of other tools that are indexed in place."""

    what = "tar files of others: found, indexed, read by the index, verified"
    tokens = (b"ustar\x0000", b".png", b".cls", b"0000", b"00000000644", b"../", b"\0" * 512)

    def __init__(self, home: Path) -> None:
        self._kinds = ("cls", "json", "folder", "cls")
        self._members: list[Members] = [samples(6, kind) for kind in self._kinds]
        self.seeds = [
            {"train-000.tar": tar(members, format), "val-000.tar": tar(samples(2, kind))}
            for members, kind, format in zip(self._members, self._kinds, (0, 1, 2, 2), strict=True)
        ]
        self.attacks = (self._hostile,)

    def _hostile(self, draw: random.Random, files: Files) -> str:
        kind = next(
            kind
            for kind, seed in zip(self._kinds, self.seeds, strict=True)
            if seed["val-000.tar"] == files["val-000.tar"]
        )
        name = draw.choice(("train-000.tar", "train-000.tar", "train-001.tar"))
        files[name], words = tars.attack(draw, samples(6, kind), kind)
        return f"{name}: {words}"

    def read(self, case: Case) -> None:
        kind = self._kinds[case.seed]
        manifest = index(case.place, labels=Labels(kind), workers=1)
        for split in manifest.splits:
            images, labels = read_all(case.place, split)
            if any(not 0 <= label < len(manifest.classes) for label in labels):
                raise oracle.Wrong("a label is outside the classes")
            if not all(images):
                raise oracle.Wrong("an image has no bytes")
        for problem in verify(case.place, workers=1):
            if "checksum differs from the index" in problem.what:
                raise oracle.Wrong(f"what was indexed just now is said to have changed: {problem}")


class _Packed(FileTarget):
    """Target whose seed is a data set written by `vitpar data pack`."""

    def __init__(self, home: Path) -> None:
        for i in range(12):
            for split in ("train", "val"):
                image = home / "source" / split / f"class{i % 3}" / f"{i}.png"
                image.parent.mkdir(parents=True, exist_ok=True)
                image.write_bytes(samples(i + 1)[-1][1])
        pack(home / "source", home / "packed", shard_samples=5, workers=1, overwrite=True)
        self._folder = home / "packed"
        self.seeds = [read_folder(self._folder)]
        self._right = {
            split: (read_all(self._folder, split), loaded(self._folder, split)) for split in ("train", "val")
        }


class PackedShards(_Packed):
    """Shards that changed after they were indexed."""

    what = "shards that changed after they were indexed: read, loaded, verified"

    def editable(self, files: Files) -> list[str]:
        return sorted(name for name in files if name.endswith(".tar"))

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.attacks = (_overwritten, _overwritten, _overwritten, _exchanged)

    def read(self, case: Case) -> None:
        for split, ((images, labels), (pixels, numbers)) in self._right.items():
            shards = ShardSet.open(case.place, split)
            changed = set()
            for i, image in enumerate(images):
                data = tolerated(partial(shards.read, i))
                if data != image:
                    changed.add(i)
                    if data is not None and shards.intact(i, data):
                        raise oracle.Wrong("an image that changed counts as intact")
                if shards.label(i) != labels[i]:
                    raise oracle.Wrong("a label changed")
            told = {problem.sample for problem in verify(case.place, workers=1) if problem.split == split}
            if changed - told:
                raise oracle.Wrong("verify is silent on an image that changed")
            got, said = loaded(case.place, split)
            if not (torch.equal(said, numbers) and torch.equal(got, pixels)):
                raise oracle.Wrong("a loader gives other pixels than were packed, and says nothing")


def _overwritten(draw: random.Random, files: Files) -> str:
    """Flip bits of a shard without changing its size."""
    name = draw.choice([name for name in sorted(files) if name.endswith(".tar")])
    data = bytearray(_bytes(files, name))
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(data))
        data[place : place + 1] = bytes([data[place] ^ (1 << draw.randrange(8))])
    files[name] = bytes(data)
    return f"{name}: bits flipped"


def _exchanged(draw: random.Random, files: Files) -> str:
    one, other = draw.sample([name for name in sorted(files) if name.endswith(".tar")], 2)
    files[one], files[other] = files[other], files[one]
    return f"{one} and {other} exchanged"


class Index(_Packed):
    """Manifest and index files, in some cases with recomputed checksums."""

    what = "dataset.json and the indices of samples"
    tokens = (
        b"'descr'",
        b"'<i4'",
        b"'|O'",
        b"True",
        b"'shape'",
        b"(",
        b")",
        b",",
        b"\x93NUMPY",
        b"\x02\0",
        b"0.5",
        b"null",
    )

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.attacks = (_manifest, _rows, _rows, _npy)

    def editable(self, files: Files) -> list[str]:
        return sorted(name for name in files if not name.endswith(".tar"))

    def read(self, case: Case) -> None:
        if "dataset.json" not in case.changed and case.changed:
            refused = tolerated(lambda: read_all(case.place, "train") and read_all(case.place, "val"))
            if refused is not None and not case.changed <= {"val-000000.tar"}:
                raise oracle.Wrong(f"{sorted(case.changed)[0]} is not what was written, and is read")
        for split in ("train", "val"):
            shards = ShardSet.open(case.place, split)
            if len(shards) > 100_000:
                raise oracle.Wrong(f"{len(shards):,} samples out of 12")
            images, labels = read_all(case.place, split)
            if any(not 0 <= label < shards.num_classes for label in labels) or not all(images):
                raise oracle.Wrong("a label is outside the classes, or an image has no bytes")
            tolerated(partial(loaded, case.place, split))
        list(verify(case.place, workers=1))


def _manifest(draw: random.Random, files: Files) -> str:
    files["dataset.json"], words = json_attack(draw, _bytes(files, "dataset.json"))
    return f"dataset.json: {words}"


def _rows(draw: random.Random, files: Files) -> str:
    """Change rows of an index and update its checksum in the manifest."""
    rows = np.load(io.BytesIO(_bytes(files, "train.index.npy"))).copy()
    column = draw.choice(rows.dtype.names)
    limits = np.iinfo(rows.dtype[column])
    values: Sequence[int] = (0, 1, -1, limits.max, limits.min, 512, 1 << 20, int(rows[column][0]) + 1)
    for _ in range(draw.choice((1, 1, len(rows)))):
        value = draw.choice(values)
        rows[column][draw.randrange(len(rows))] = min(max(value, int(limits.min)), int(limits.max))
    if draw.random() < 0.2:
        rows = draw.choice((rows[:-1], rows[:0], np.repeat(rows, 2), rows[::-1], rows.reshape(2, -1), rows["label"]))
    file = io.BytesIO()
    np.save(file, rows)
    _sealed(files, file.getvalue(), len(rows))
    return f"train.index.npy: {column}"


def _sealed(files: Files, data: bytes, samples: int) -> None:
    """Write `data` as the index of the training split and update the manifest."""
    manifest: dict[str, Any] = json.loads(_bytes(files, "dataset.json"))
    manifest["splits"]["train"] |= {"index_sha256": hashlib.sha256(data).hexdigest(), "samples": samples}
    files["train.index.npy"], files["dataset.json"] = data, json.dumps(manifest).encode()


def _npy(draw: random.Random, files: Files) -> str:
    """Write a wrong .npy header and update the manifest."""
    data = _bytes(files, "train.index.npy")
    length = struct.unpack_from("<H", data, 8)[0]
    said, body = data[10 : 10 + length].decode(), data[10 + length :]
    shape = draw.choice(
        ("(-1,)", "(0,)", "(99999999999,)", "(2**40,)", "()", "(12, 1)", "(" * 500 + ")" * 500, "(1e9,)", "(" * 100_000)
    )
    descr = draw.choice(
        ("'|O'", "[('a', '|O')]", "'<i8'", "'|V8000000000'", "[('label', '<i4', (2147483647,))]", "'<U999999999'")
    )
    words = (
        said.replace("(12,)", shape),
        f"{{'descr': {descr}, 'fortran_order': False, 'shape': (12,), }}",
        said.replace("False", "True"),
        said.replace("'shape'", "'shap'"),
        "{" * 50_000,
        "__import__('os').system('sh')",
        "1" * 5_000 + said,
        said + " " * 5_000_000,
    )
    text = draw.choice(words).encode()
    version, width = draw.choice(((1, 2), (2, 4), (3, 4), (9, 4)))
    claimed = draw.choice((len(text), len(text), len(text), (1 << 8 * width) - 1)) % (1 << 8 * width)
    whole = b"\x93NUMPY" + bytes([version, 0]) + claimed.to_bytes(width, "little") + text + body
    _sealed(files, whole, draw.choice((12, 12, 99_999_999_999, 0)))
    return "train.index.npy: its header"


def _bytes(files: Files, name: str) -> bytes:
    content = files[name]
    assert isinstance(content, bytes)
    return content
