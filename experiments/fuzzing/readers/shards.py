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
        files.append((f"{name}.{labels}", b"%d" % (i % 3) if labels == "cls" else b'{"label": %d}' % (i % 3)))
        files.append((f"{name}.{'jpg' if i % 2 else 'png'}", encoded(i, "JPEG" if i % 2 else "PNG", (8, 8))))
    return tar(file for file in files if not file[0].endswith(".folder"))


class Tar(Target):
    """Tar files of others: found, indexed, read by the index, verified."""

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
            if None in read_all(place, split):
                raise oracle.Wrong("an image that was indexed cannot be read")
        for problem in verify(place, workers=1):
            if "checksum differs from the index" in problem.what:
                raise oracle.Wrong(f"an unchanged image does not match its new index: {problem}")


def read_all(folder: Path, split: str) -> list[tuple[bytes, int] | None]:
    """Return the images of a split with their labels, None for those that are refused; also read their names."""
    shards, found = ShardSet.open(folder, split), list[tuple[bytes, int] | None]()
    if len(shards) > 100_000:
        raise oracle.Wrong(f"{len(shards):,} samples")
    for i in range(len(shards)):
        tolerated(partial(shards.name, i))
        image, label = tolerated(partial(shards.read, i)), shards.label(i)
        if image == b"" or not 0 <= label < shards.num_classes:
            raise oracle.Wrong("a label is outside the classes, or an image has no bytes")
        found.append(None if image is None else (image, label))
    return found


def loaded(folder: Path, split: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of a split, loaded as for an evaluation."""
    loader = EvalLoader(ShardSet.open(folder, split), EvalTransform(8), batch_size=4, workers=0)
    return [(batch.images, batch.labels) for batch in loader]


class Packed(Target):
    """Shards, index and dataset.json that changed after packing, in some cases with right checksums of the index."""

    def make(self, home: Path) -> None:
        write_tree(home / "source", 4, 2)
        pack(home / "source", home / "packed", shard_samples=5, workers=1)
        self.seeds = [read_folder(home / "packed")]
        self.right = {s: (read_all(home / "packed", s), loaded(home / "packed", s)) for s in ("train", "val")}
        text, rows = self.seeds[0][MANIFEST], self.seeds[0][ROWS]
        names = ("a\0.tar", "a\ud800.tar", "x" * 5_000, "../train-000000.tar", "/etc/passwd")
        manifests = [text.replace(b'"train-000000.tar"', json.dumps(name).encode()) for name in names]
        manifests.append(json.dumps(json.loads(text) | {"classes": ["x"] * 3_000_000}).encode())
        self.triggers = [self.case(0, {MANIFEST: data}) for data in manifests]
        for header in PIECES["npy"]:
            files = self.seeds[0] | {ROWS: header + rows[128:]}
            self.seal(files)
            if b"99999999999" in header:
                files[MANIFEST] = files[MANIFEST].replace(b'"samples": 12', b'"samples": 99999999999')
            self.triggers.append(self.case(0, files, sealed=True))

    def seal(self, files: Files) -> bool:
        """Correct the checksum of the index in the manifest."""
        if files[MANIFEST] == self.seeds[0][MANIFEST]:
            manifest = json.loads(files[MANIFEST])
            manifest["splits"]["train"]["index_sha256"] = hashlib.sha256(files[ROWS]).hexdigest()
            files[MANIFEST] = json.dumps(manifest).encode()
        return True

    def read(self, case: Case, place: Path) -> None:
        for split, (samples, batches) in self.right.items():
            found = read_all(place, split)
            loads = tolerated(partial(loaded, place, split))
            problems = {problem.sample for problem in verify(place, workers=1) if problem.split == split}
            if MANIFEST in case.changed:
                continue
            if any(sample not in (None, right) for sample, right in zip(found, samples, strict=True)):
                raise oracle.Wrong("an image or label that changed is read")
            if {number for number, sample in enumerate(found) if sample is None} - problems:
                raise oracle.Wrong("verify is silent on an image that changed")
            if loads and not all(map(torch.equal, sum(loads, ()), sum(batches, ()))):
                raise oracle.Wrong("a loader gives other pixels than were packed, and says nothing")
        if any(name.endswith(".npy") for name in case.changed) and MANIFEST not in case.changed:
            raise oracle.Wrong("an index is not what was written, and is read")
