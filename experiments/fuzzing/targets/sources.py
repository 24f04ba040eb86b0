"""Targets: sources of data sets (TFRecords, Parquet, zip files with maps, lists, folders)."""

from __future__ import annotations

import random
from pathlib import Path

from fuzzing import oracle
from fuzzing.attacks import records, tables, zips
from fuzzing.seeds import png
from fuzzing.target import Case, Files, FileTarget
from vitpar.data.sources import open_source

MOST = 64
"""Images that are read from the beginning and from the end of a split."""
NAMES = tuple(f"class{i}" for i in range(3))


def read_source(place: Path) -> dict[str, list[tuple[bytes, str]]]:
    """Return the images of every split with the names of their classes."""
    source = open_source(place)
    found = {}
    for split, images in source.splits.items():
        count = len(images.labels)
        if len(images.names) != count:
            raise oracle.Wrong(f"{len(images.names)} names for {count} labels")
        if count and not 0 <= int(images.labels.min()) <= int(images.labels.max()) < len(source.classes):
            raise oracle.Wrong("a label is outside the classes")
        taken = range(count) if count <= 2 * MOST else [*range(MOST), *range(count - MOST, count)]
        found[split] = [(images.read(i), str(source.classes[int(images.labels[i])])) for i in taken]
    return found


def content(files: Files, name: str) -> bytes:
    """Return the content of a regular file."""
    found = files[name]
    assert isinstance(found, bytes)
    return found


class TFRecords(FileTarget):
    """ImageNet as TFRecords."""

    what = "TFRecords of images and labels"
    tokens = (
        b"\x0a",
        b"image/encoded",
        b"image/class/label",
        records.varint(1 << 63),
        b"\xff" * 9 + b"\x01",
        b"\x80" * 10,
    )

    def __init__(self, home: Path) -> None:
        self._examples = [(png(i), i % 3, NAMES[i % 3].encode()) for i in range(9)]
        self._right = {(image, name.decode()) for image, _, name in self._examples}
        files = {
            "train-00000-of-00002": range(4),
            "train-00001-of-00002": range(4, 6),
            "validation-00000-of-00001": range(6, 9),
        }
        self.seeds = [
            {
                name: b"".join(records.record(records.example(*self._examples[i])) for i in which)
                for name, which in files.items()
            }
        ]
        self.attacks = (self._hostile,)
        self._sealed: set[int] = set()

    def _hostile(self, draw: random.Random, files: Files) -> str:
        name = draw.choice(sorted(files))
        files[name], words = records.attack(draw, self._examples[:4])
        return f"sealed {name}: {words}"

    def read(self, case: Case) -> None:
        found = read_source(case.place)
        if "sealed" in case.how:
            return
        for split, images in found.items():
            for image, name in images:
                # Class names may be missing: one contradicting label makes the source use numbers instead.
                if (image, name) not in self._right and (name in NAMES or image not in {one for one, _ in self._right}):
                    raise oracle.Wrong(f"an image of {split} or its label is not what was written, and nothing is said")


class Parquet(FileTarget):
    """Parquet files in the layout of Hugging Face."""

    what = "Parquet files of images and labels"
    tokens = (
        b"PAR1",
        b"\x15\x00",
        b"\x15\x04",
        b"\x19\x1c",
        b"image",
        b"label",
        b"\xff\xff\xff\xff\x0f",
        b"huggingface",
    )

    def __init__(self, home: Path) -> None:
        self.seeds = [
            {
                "train-00000-of-00002.parquet": tables.images(range(5)),
                "train-00001-of-00002.parquet": tables.images(range(5, 9)),
                "test-00000-of-00001.parquet": tables.images(range(3)),
            },
            {"data/train.parquet": tables.images(range(8), compression="gzip", known=False)},
            {"train.parquet": tables.images(range(4), compression="zstd")},
        ]
        self.attacks = (self._columns, self._columns, self._footer, self._footer)

    def _columns(self, draw: random.Random, files: Files) -> str:
        name = draw.choice(sorted(files))
        files[name], words = tables.attack(draw)
        return f"{name}: {words}"

    def _footer(self, draw: random.Random, files: Files) -> str:
        """Change numbers in the footer of a file, or its length."""
        name = draw.choice(sorted(files))
        data = bytearray(content(files, name))
        length = int.from_bytes(data[-8:-4], "little")
        if draw.random() < 0.15:
            data[-8:-4] = draw.choice((0, 1, length - 1, length + 1, 0x7FFFFFFF, 0xFFFFFFFF)).to_bytes(4, "little")
        else:
            for _ in range(draw.randint(1, 3)):
                place = len(data) - 8 - draw.randint(1, min(length, len(data) - 8) or 1)
                data[place] = draw.choice((0, 1, 2, 4, 0x7F, 0x80, 0xFE, 0xFF, draw.randrange(256)))
        files[name] = bytes(data)
        return f"{name}: footer"

    def read(self, case: Case) -> None:
        read_source(case.place)


class ZipsAndLists(FileTarget):
    """ImageNet in zip files, images of a CSV list, and folders of classes."""

    what = "train.zip and val.zip with maps and class names; CSV lists; folders of classes"
    tokens = (b"\t", b"\n", b"PK\1\2", b"PK\3\4", b"PK\5\6", b",", b'"', b"-1", b"999999", b"../", b"\r", b"\0")

    def __init__(self, home: Path) -> None:
        self._images = [(f"{NAMES[i % 3]}/{i}.png", png(i)) for i in range(6)]
        whole, map_ = (
            zips.packed(self._images),
            "".join(f"{name}\t{i % 3}\n" for i, (name, _) in enumerate(self._images)).encode(),
        )
        stored = zips.packed(self._images, 0)
        lines = "".join(
            f"{name},{NAMES[i % 3]},{'val' if i > 3 else 'train'}\n" for i, (name, _) in enumerate(self._images)
        )
        self.seeds = [
            {"train.zip": whole, "val.zip": stored, "train_map.txt": map_, "val_map.txt": map_},
            {
                "train.zip": whole,
                "val.zip": whole,
                "train_map.txt": map_,
                "val_map.txt": map_,
                "classes.txt": b"a\nb\nc\n",
            },
            {"list.csv": b"path,label,split\n" + lines.encode(), **dict(self._images)},
            {
                "list.csv": b"path,label\n"
                + b"".join(b"%s,%d\n" % (n.encode(), i % 3) for i, (n, _) in enumerate(self._images))
            }
            | dict(self._images),
            dict(self._images),
        ]
        self.attacks = (_zip, _zip, _map, _list)

    def read(self, case: Case) -> None:
        listed = "list.csv" in self.seeds[case.seed]
        found = read_source(case.place / "list.csv" if listed else case.place)
        if any(name.endswith(".zip") for name in case.changed) and "sealed" not in case.how:
            known = {image for _, image in self._images}
            if any(image not in known for images in found.values() for image, _ in images):
                raise oracle.Wrong("an image out of a zip file is not what was written, and nothing is said")


def _zip(draw: random.Random, files: Files) -> str:
    names = [name for name in sorted(files) if name.endswith(".zip")]
    if not names:
        return _list(draw, files)
    name = draw.choice(names)
    files[name], words = zips.attack(draw, content(files, name))
    return f"sealed {name}: {words}"


def _map(draw: random.Random, files: Files) -> str:
    names = [name for name in sorted(files) if name.endswith(".txt")]
    if not names:
        return _list(draw, files)
    name = draw.choice(names)
    lines = content(files, name).split(b"\n")
    labels = (
        b"-1",
        b"999999",
        b"1000000",
        b"9" * 5_000,
        b"1_0",
        b"\xd9\xa1",
        b"",
        b"x",
        b"1e3",
        b" 1 ",
        b"0x1",
        b"2147483648",
    )
    entries = (b"../x", b"", b"\0", b"class0/0.png", b"nothing", b"x" * 100_000, b"\x1b[31m", b"a\tb", b"\xff\xfe")
    lines[draw.randrange(len(lines))] = (
        draw.choice(entries) + draw.choice((b"\t", b"\t\t", b" ", b"")) + draw.choice(labels)
    )
    files[name] = b"\n".join(lines * draw.choice((1, 1, 1, 3_000)))
    return f"{name}: a line"


def _list(draw: random.Random, files: Files) -> str:
    if "list.csv" not in files:
        return _map(draw, files) if "train_map.txt" in files else "nothing"
    lines = content(files, "list.csv").split(b"\n")
    cells = (
        b'"',
        b'"a\nb"',
        b"../x",
        b"/etc/passwd",
        b"x" * 20_000,
        b"\0",
        b"",
        b"train",
        b"9" * 5_000,
        b"-1",
        b"\xff",
        b"class0",
    )
    line = b",".join(draw.choice(cells) for _ in range(draw.choice((0, 1, 2, 3, 4, 300))))
    place = draw.randrange(len(lines))
    lines[place : place + draw.choice((0, 1))] = [line]
    files["list.csv"] = draw.choice((b"\n", b"\n", b"\r", b"\n\n")).join(lines)
    return "list.csv: a line"
