"""Targets: tar files of others that are indexed in place, and packed data sets that were changed, with their index."""

import gzip
import hashlib
import json
import lzma
from functools import partial
from pathlib import Path

import torch

from fuzzing import oracle
from fuzzing.case import Case, Files, Target, read_folder
from fuzzing.hostile import PIECES, TAR_PIECES, gzip_zeros
from fuzzing.oracle import tolerated
from helpers.imagenet_archives import tar
from helpers.tiny_images import encoded, write_tree
from vitpar.data import EvalLoader, EvalTransform, Labels, ShardSet, index, pack, verify

ROWS, MANIFEST = "train.index.npy", "dataset.json"


def samples(count: int, labels: str = "cls") -> bytes:
    """Return a tar file of `count` images with their labels.

    labels: `cls` or `json` for a label file per image, `folder` for a folder per class.
    """
    files = []
    for i in range(count):
        name = f"class{i % 3}/{i:04d}" if labels == "folder" else f"{i:04d}"
        if labels != "folder":
            files.append((f"{name}.{labels}", b"%d" % (i % 3) if labels == "cls" else b'{"label": %d}' % (i % 3)))
        files.append((f"{name}.{'jpg' if i % 2 else 'png'}", encoded(i, "JPEG" if i % 2 else "PNG", (8, 8))))
    return tar(files)


def read_all(folder: Path, split: str) -> tuple[list[bytes], list[int]]:
    """Return the images and labels of a split; also reads the names of samples."""
    shards = ShardSet.open(folder, split)
    images = [shards.read(i) for i in range(len(shards))]
    for i in range(len(shards)):
        shards.name(i)
    return images, [shards.label(i) for i in range(len(shards))]


class ForeignShards(Target):
    """Tar files of other tools."""

    about = "tar files of others: found, indexed, read by the index, verified"
    kinds = ("cls", "json", "folder")

    def make(self, home: Path) -> None:
        self.seeds = [{"train-0.tar": samples(6, kind), "val-0.tar": samples(2, kind)} for kind in self.kinds]
        whole = samples(6)
        self.pieces = (gzip.compress(whole), lzma.compress(whole), b"BZh9" + whole, gzip_zeros(), whole + whole)
        hostile = (*(samples(2)[:-1024] + piece + bytes(1024) for piece in TAR_PIECES), *self.pieces)
        self.triggers = [self.case(int(b"0000.json" in data), {"train-0.tar": data}) for data in hostile]

    def read(self, case: Case, place: Path) -> None:
        manifest = index(place, labels=Labels(self.kinds[case.seed]), workers=1)
        for split in manifest.splits:
            images, labels = read_all(place, split)
            if any(not 0 <= label < len(manifest.classes) for label in labels) or not all(images):
                raise oracle.Wrong("a label is outside the classes, or an image has no bytes")
        for problem in verify(place, workers=1):
            if "checksum differs from the index" in problem.what:
                raise oracle.Wrong(f"an unchanged image does not match its new index: {problem}")


def loaded(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels and labels of a split, loaded as for an evaluation."""
    batches = list(EvalLoader(ShardSet.open(folder, split), EvalTransform(8), batch_size=4, workers=0))
    return torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])


class PackedShards(Target):
    """Shards that changed after they were indexed."""

    about = "shards that changed after they were indexed: read, loaded, verified"

    def make(self, home: Path) -> None:
        write_tree(home / "source", 4, 2)
        pack(home / "source", home / "packed", shard_samples=5, workers=1)
        self.seeds = [read_folder(home / "packed")]
        self.right = {s: (read_all(home / "packed", s), loaded(home / "packed", s)) for s in ("train", "val")}

    def editable(self, files: Files) -> list[str]:
        return [name for name in super().editable(files) if name.endswith(".tar")]

    def read(self, case: Case, place: Path) -> None:
        for split, ((images, labels), (pixels, numbers)) in self.right.items():
            shards = ShardSet.open(place, split)
            changed = set()
            for i, image in enumerate(images):
                data = tolerated(partial(shards.read, i))
                if data is not None and data != image:
                    raise oracle.Wrong("an image that changed is read")
                if data is None:
                    changed.add(i)
                if shards.label(i) != labels[i]:
                    raise oracle.Wrong("a label changed")
            if changed - {problem.sample for problem in verify(place, workers=1) if problem.split == split}:
                raise oracle.Wrong("verify is silent on an image that changed")
            got, said = loaded(place, split)
            if not (torch.equal(said, numbers) and torch.equal(got, pixels)):
                raise oracle.Wrong("a loader gives other pixels than were packed, and says nothing")


class Index(PackedShards):
    """Manifest and index files, in some cases with recomputed checksums."""

    about = "dataset.json and the indices of samples"

    def make(self, home: Path) -> None:
        super().make(home)
        text, rows = self.seeds[0][MANIFEST], self.seeds[0][ROWS]
        assert isinstance(text, bytes) and isinstance(rows, bytes)
        names = ("a\0.tar", "a\ud800.tar", "x" * 5_000, "../train-000000.tar", "/etc/passwd")
        manifests = [text.replace(b'"train-000000.tar"', json.dumps(name).encode()) for name in names]
        manifests.append(json.dumps(json.loads(text) | {"classes": ["x"] * 3_000_000}).encode())
        self.triggers = [self.case(0, {MANIFEST: data}) for data in manifests]
        for header in PIECES["npy"]:
            files = self.seeds[0] | {ROWS: header + rows[128:]}
            self.seal(files)
            text = files[MANIFEST]
            if isinstance(text, bytes) and b"99999999999" in header:
                files[MANIFEST] = text.replace(b'"samples": 12', b'"samples": 99999999999')
            self.triggers.append(self.case(0, files, sealed=True))

    def editable(self, files: Files) -> list[str]:
        return [name for name in Target.editable(self, files) if not name.endswith(".tar")]

    def seal(self, files: Files) -> bool:
        """Correct the checksum of the index in the manifest."""
        rows, text = files[ROWS], files[MANIFEST]
        if isinstance(rows, bytes) and isinstance(text, bytes) and text == self.seeds[0][MANIFEST]:
            manifest = json.loads(text)
            manifest["splits"]["train"]["index_sha256"] = hashlib.sha256(rows).hexdigest()
            files[MANIFEST] = json.dumps(manifest).encode()
        return True

    def read(self, case: Case, place: Path) -> None:
        for split in ("train", "val"):
            shards = ShardSet.open(place, split)
            if len(shards) > 100_000:
                raise oracle.Wrong(f"{len(shards):,} samples out of 12")
            images, labels = read_all(place, split)
            if any(not 0 <= label < shards.num_classes for label in labels) or not all(images):
                raise oracle.Wrong("a label is outside the classes, or an image has no bytes")
            tolerated(partial(loaded, place, split))
        list(verify(place, workers=1))
        if MANIFEST not in case.changed and case.changed:
            raise oracle.Wrong("an index is not what was written, and is read")
