"""The three archives of ILSVRC2012 with a few tiny images, and tiny CIFAR-10 and CIFAR-100 as they are published."""

import io
import pickle
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import savemat

from helpers.tiny_images import encoded

SYNSETS = {
    3: ("n01440764", "tench, Tinca tinca"),
    1: ("n02119789", "kit fox, Vulpes macrotis"),
    2: ("n02100735", "English setter"),
}
"""WordNet id and name of each class, by its number in the development kit, whose order differs from WordNet's."""
GROUP = ("n02084071", "dog, domestic dog, Canis familiaris")
VAL = (2, 2, 1, 3, 1)
"""Classes of the validation images, by their numbers in the development kit."""
VAL_ORDER = (3, 0, 4, 1, 2)
"""Order of the validation images in their archive."""


def write_imagenet(folder: Path, train: int = 4, compressed: bool = True) -> None:
    """Write the three archives, with `train` images per class."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = []
    for number in (1, 3, 2):
        synset, _ = SYNSETS[number]
        images = [(f"{synset}_{i}.JPEG", encoded(10 * number + i)) for i in range(train)]
        inner.append((f"{synset}.tar", tar(images)))
    (folder / "ILSVRC2012_img_train.tar").write_bytes(tar(inner))
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, len(VAL) + 1)]
    images = [(name, encoded(50 + i)) for i, name in enumerate(names)]
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar(images[place] for place in VAL_ORDER))
    truth = "".join(f"{number}\n" for number in VAL).encode()
    write_kit(folder, meta(compressed=compressed), truth)


def write_kit(folder: Path, table: bytes, truth: bytes) -> None:
    """Write the development kit.

    table: content of its meta.mat
    truth: content of its list of validation classes
    """
    place = "ILSVRC2012_devkit_t12"
    files = [
        (f"{place}/readme.txt", b"ImageNet"),
        (f"{place}/data/meta.mat", table),
        (f"{place}/data/ILSVRC2012_validation_ground_truth.txt", truth),
    ]
    (folder / f"{place}.tar.gz").write_bytes(tar(files, "w:gz"))


def meta(compressed: bool = True, **changed: Any) -> bytes:
    """Return the table of synsets as MATLAB stores it, written by SciPy.

    changed: columns with other values in the first row
    """
    rows = [(number, *SYNSETS[number], "a gloss", 0, np.zeros((1, 0)), 0, 1300) for number in sorted(SYNSETS)]
    rows.append((4, *GROUP, "a gloss", 2, np.array([[1, 2]]), 3, 0))
    fields = (
        *("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height"),
        "num_train_images",
    )
    table = np.empty((len(rows), 1), [(field, object) for field in fields])
    for place, row in enumerate(rows):
        table[place, 0] = row
    for field, value in changed.items():
        table[0, 0][field] = value
    file = io.BytesIO()
    savemat(file, {"other": np.eye(3), "synsets": table}, do_compression=compressed)
    return file.getvalue()


def tar(files: Iterable[tuple[str, bytes]], mode: str = "w") -> bytes:
    """Return a tar file of (name, content) pairs."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def cifar_files(hundred, binary, count=4):
    """Return the files of a tiny CIFAR, its (label, pixels) by split, and its class names."""
    rng = np.random.default_rng(0)

    def batch():
        return rng.integers(0, 256, (count, 3072), np.uint8), rng.integers(0, 10, count)

    names = ["train", "test"] if hundred else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    files, images = {}, {"train": [], "val": []}
    for name in names:
        pixels, labels = batch()
        images["val" if name.startswith("test") else "train"] += zip(labels.tolist(), pixels, strict=True)
        if binary:
            coarse = np.zeros((count, 1 if hundred else 0), np.uint8)
            files[f"{name}.bin"] = np.hstack([coarse, labels[:, None].astype(np.uint8), pixels]).tobytes()
        else:
            key = b"fine_labels" if hundred else b"labels"
            files[name] = pickle.dumps({b"data": pixels, key: labels.tolist()}, protocol=2)
    words = [f"word{i}" for i in range(100 if hundred else 10)]
    if binary:
        files["fine_label_names.txt" if hundred else "batches.meta.txt"] = "\n".join([*words, ""]).encode()
    else:
        key = b"fine_label_names" if hundred else b"label_names"
        files["meta" if hundred else "batches.meta"] = pickle.dumps(
            {key: [word.encode() for word in words]}, protocol=2
        )
    return files, images, words
