"""Tiny CIFAR-10 and CIFAR-100 as they are published."""

import pickle

import numpy as np


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
