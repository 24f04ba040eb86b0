"""Targets: data sets in TFRecords, Parquet, zip files, lists, folders, and the archives of CIFAR and ImageNet."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import scipy.io  # noqa: F401, vitpar's reader imports it when it needs it
from hypothesis import strategies as st

from fuzzing import oracle
from fuzzing.case import Case, Target, read_folder
from fuzzing.edits import VALUES, Draw, pick
from fuzzing.hostile import BOMB_BYTES, LONG, MESSAGES, WHOLE_PICKLES, WORDS, gzip_zeros, zip_bomb
from helpers.cifar_files import cifar_files
from helpers.hostile_files import tar_member
from helpers.imagenet_archives import tar, write_imagenet
from helpers.tfrecord_files import record, write_tfrecords
from helpers.tiny_images import CLASSES, encoded, write_tree, write_zips
from vitpar.data.sources import open_source

MOST = 64
"""Images that are read from the begin and from the end of a split."""
Pairs = list[tuple[bytes, str]]


def read_source(place: Path) -> Pairs:
    """Return the images of all splits with the names of their classes."""
    listed = [path for path in sorted(place.iterdir()) if path.name.startswith(("list.csv", "cifar.tar"))]
    source, found = open_source(listed[0] if listed else place), Pairs()
    for images in source.splits.values():
        count = len(images.labels)
        if len(images.names) != count:
            raise oracle.Wrong(f"{len(images.names)} names for {count} labels")
        if count and not 0 <= int(images.labels.min()) <= int(images.labels.max()) < len(source.classes):
            raise oracle.Wrong("a label is outside the classes")
        taken = range(count) if count <= 2 * MOST else [*range(MOST), *range(count - MOST, count)]
        found += [(images.read(i), str(source.classes[int(images.labels[i])])) for i in taken]
    return found


class Source(Target):
    """Data set in a folder."""

    checked = ""
    """`images` or `pairs` (with labels) if checksums protect them, so that only what was written may be accepted."""

    def make(self, home: Path) -> None:
        self.write(home)
        folders = sorted(home.iterdir())
        self.seeds = [read_folder(folder) for folder in folders]
        self.right = {pair for folder in folders for pair in read_source(folder)}
        self.add()

    def write(self, home: Path) -> None:
        """Write the seeds, each into a folder of its name."""
        raise NotImplementedError

    def add(self) -> None:
        """Set pieces and triggers."""

    def read(self, case: Case, place: Path) -> None:
        found = read_source(place)
        images = {image for image, _ in self.right}
        if case.is_seed and not {*found} <= self.right:
            raise oracle.Wrong("the images of a seed are not what was written")
        for image, name in found if self.checked and not case.sealed else ():
            # Class names may be missing: one contradicting label makes the source use numbers instead.
            named = self.checked == "pairs" and name in CLASSES
            if image not in images or (named and (image, name) not in self.right):
                raise oracle.Wrong("an image or its label is not what was written, and nothing is said")


class TFRecord(Source):
    """TFRecords of images and labels."""

    checked = "pairs"

    def write(self, home: Path) -> None:
        write_tfrecords(home / "records")

    def add(self) -> None:
        name = "train-00000-of-00002"
        self.triggers = [self.case(0, {name: record(message)}, sealed=True) for message in MESSAGES]


IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
NAMES = {"info": {"features": {"label": {"names": CLASSES, "_type": "ClassLabel"}}}}
IMAGES, LABELS = pyarrow.array([{"bytes": encoded(i), "path": f"{i}.png"} for i in range(5)], IMAGE), [0, 1, 2, 0, 1]
TYPES = (IMAGE, pyarrow.uint64(), pyarrow.timestamp("ns"), pyarrow.decimal128(25), pyarrow.binary(), pyarrow.string())
PLAIN = [1, "a", b"a", 0.5, float("inf"), None, True, [1], {"a": {"bytes": b"x"}}, {"bytes": "x"}, {"bytes": 1}, -1]
PLAIN += [1 << 40, 2_000_000, [{"bytes": b"x"}], {"bytes": None, "path": "/etc/passwd"}]


def parquet(image: Any, label: Any, known: str | None = None, compression: str = "zstd", group: int = 2) -> bytes:
    """Return a Parquet file.

    known: metadata in the layout of Hugging Face. group: rows of a row group.
    """
    table, file = pyarrow.table({"image": image, "label": label}), io.BytesIO()
    if known is not None:
        table = table.replace_schema_metadata({b"huggingface": known.encode()})
    pyarrow.parquet.write_table(table, file, compression=compression, row_group_size=group)
    return file.getvalue()


class Parquet(Source):
    """Parquet files of images and labels, in the layout of Hugging Face."""

    def write(self, home: Path) -> None:
        for kind, known in (("zstd", json.dumps(NAMES)), ("snappy", json.dumps(NAMES)), ("gzip", None)):
            (home / kind / "data").mkdir(parents=True)
            (home / kind / "data" / "train.parquet").write_bytes(parquet(IMAGES, LABELS, known, kind))

    def add(self) -> None:
        large, count = pyarrow.array([{"bytes": bytes(60 << 20), "path": None}], IMAGE), 10_000_000
        self.pieces = (
            *(parquet(IMAGES, [value] * 5) for value in PLAIN),
            *(parquet([value] * 5, LABELS) for value in PLAIN),
            *(parquet(IMAGES, LABELS, text) for text in WORDS["parquet"]["metadata"]),
            *(parquet(large.take(pyarrow.array([0] * n)), [0] * n, group=group) for n, group in ((5, 1), (12, 12))),
            parquet(pyarrow.nulls(count, IMAGE), np.zeros(count, np.int64), group=count // 8),
        )
        self.triggers = [self.case(0, {"data/train.parquet": data}) for data in self.pieces]

    def drawn(self, draw: Draw) -> Case:
        if pick(draw, (False, False, True)):
            try:
                values = (pyarrow.array(draw(st.lists(VALUES, min_size=5, max_size=5))) for _ in range(2))
                image, label = (value.cast(pick(draw, (value.type, *TYPES))) for value in values)
                return self.case(0, {"data/train.parquet": parquet(pick(draw, (IMAGES, image)), label)})
            except (pyarrow.ArrowException, OverflowError, ValueError, TypeError):  # not of one type
                pass
        return super().drawn(draw)


class Zip(Source):
    """Images in train.zip and val.zip, with maps and class names."""

    checked = "images"

    def write(self, home: Path) -> None:
        for name in ("named", "numbered"):
            write_zips(home / name, classes=name == "named")

    def add(self) -> None:
        bombs = [zip_bomb("ant/0.png", claimed) for claimed in (BOMB_BYTES, 10, (1 << 32) - 1)]
        self.triggers = [self.case(0, {"train.zip": data}, sealed=True) for data in bombs]


class List(Source):
    """CSV lists of images, and folders of classes."""

    def write(self, home: Path) -> None:
        for kind in ("folder", "list"):
            write_tree(home / kind, 2, 1)
        rows = [f"{name},{name.split('/')[1]},{name.split('/')[0]}\n" for name in read_folder(home / "list")]
        (home / "list" / "list.csv").write_text("".join(["path,label,split\n", *rows]))

    def add(self) -> None:
        texts = [b"path,label\n" + name.encode("utf-8", "surrogatepass") + b",1\n" for name in (*LONG, "x" * 300)]
        self.triggers = [self.case(1, {"list.csv": text}) for text in texts]


class Cifar(Source):
    """CIFAR-10 and CIFAR-100, binary and pickled, as folders and archives."""

    def write(self, home: Path) -> None:
        for hundred, binary in ((False, True), (False, False), (True, True), (True, False)):
            files, _, _ = cifar_files(hundred, binary, count=2)
            whole = tar((f"cifar/{name}", body) for name, body in files.items())
            archives = {"packed": {"cifar.tar.gz": gzip.compress(whole)}, "plain": {"cifar.tar": whole}}
            for form, parts in (archives | {"folder": files}).items():
                Case(parts).write(home / f"{form} {hundred} {binary}")

    def add(self) -> None:
        self.pieces = WHOLE_PICKLES
        bomb = gzip.compress(tar_member("cifar/data_batch_1", b"", size=BOMB_BYTES)) + gzip_zeros()
        hostile = [*(("data_batch_1", data) for data in WHOLE_PICKLES), ("cifar.tar.gz", bomb)]
        self.triggers = [
            self.case(next(i for i, files in enumerate(self.seeds) if name in files), {name: data})
            for name, data in (*hostile, ("cifar.tar.gz", gzip_zeros()))
        ]


class ImageNet(Source):
    """ImageNet as published: tar files of tar files, and a kit with a MATLAB file."""

    def write(self, home: Path) -> None:
        for compressed in (True, False):
            write_imagenet(home / str(compressed), 2, compressed)
