"""Linear classifiers and nearest neighbours on features, against torch's SGD and scikit-learn."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from vitpar.errors import DataError
from vitpar.training.parquet_file import Features, feature_file, read_features
from vitpar.training.probe import LinearProbe, nearest_neighbours, train_classifiers

CPU, CLASSES, WIDTH = torch.device("cpu"), 4, 6


def features(images: int, seed: int) -> Features:
    """Return clusters that overlap."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, images)
    centres = np.random.default_rng(0).normal(size=(CLASSES, WIDTH))
    embeddings = 3 + 2 * centres[labels] + 1.5 * draw.normal(size=(images, WIDTH))
    return Features(torch.tensor(embeddings, dtype=torch.float32), torch.tensor(labels), {})


TRAIN, VAL = features(240, 1), features(100, 2)


def accuracy(weight: torch.Tensor, bias: torch.Tensor, given: Features) -> float:
    return ((given.embeddings @ weight.T + bias).argmax(1) == given.labels).float().mean().item()


@pytest.mark.parametrize("standardize", [False, True])
def test_each_classifier_is_that_of_torch_alone(standardize: bool) -> None:
    settings = LinearProbe((0.01, 0.3), 3, 100, weight_decay=0.02, standardize=standardize, seed=5)
    x = TRAIN.embeddings
    norm = nn.BatchNorm1d(WIDTH, eps=1e-6, affine=False, momentum=1.0)
    norm(x)
    norm.running_var.mul_((len(x) - 1) / len(x))  # torch keeps the unbiased one
    for probed in train_classifiers(TRAIN, VAL, CLASSES, settings, CPU):
        generator = torch.Generator().manual_seed(5)
        linear = nn.Linear(WIDTH, CLASSES)
        linear.weight.data, linear.bias.data = 0.01 * torch.randn(CLASSES, WIDTH, generator=generator), torch.zeros(4)
        groups = [{"params": [linear.weight], "weight_decay": 0.02}, {"params": [linear.bias]}]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        for step in range(6):  # 240 images are 2 batches of 100
            if step % 2 == 0:
                order = torch.randperm(240, generator=generator)
            chosen = order[step % 2 * 100 : step % 2 * 100 + 100]
            rows = norm.eval()(x[chosen]) if standardize else x[chosen]
            for group in optimizer.param_groups:
                group["lr"] = probed.rate * 100 / 256 * (1 + math.cos(math.pi * step / 6)) / 2
            optimizer.zero_grad()
            F.cross_entropy(linear(rows), TRAIN.labels[chosen]).backward()
            optimizer.step()
        made = VAL.embeddings @ probed.weight.T + probed.bias
        expected = linear(norm(VAL.embeddings) if standardize else VAL.embeddings)
        torch.testing.assert_close(made, expected.detach(), atol=1e-5, rtol=1e-5)
        assert probed.val == pytest.approx(accuracy(probed.weight, probed.bias, VAL))
        assert probed.train == pytest.approx(accuracy(probed.weight, probed.bias, TRAIN))


def test_a_classifier_that_diverges_is_not_the_best() -> None:
    ordinary, diverged = train_classifiers(TRAIN, VAL, CLASSES, LinearProbe((0.1, 1e38), 3, 100), CPU)
    assert not diverged.weight.isfinite().all() and diverged.val == diverged.train == 0 < ordinary.val


def test_neighbours_vote_as_in_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitpar.training.probe._SIMILARITIES", 240 * 30)
    found = nearest_neighbours(TRAIN, VAL, CLASSES, (1, 10, 100), 0.07, CPU)
    for count, share in zip((1, 10, 100), found, strict=True):
        theirs = KNeighborsClassifier(count, weights=lambda d: np.exp((1 - d) / 0.07), metric="cosine")
        theirs.fit(TRAIN.embeddings.numpy(), TRAIN.labels.numpy())
        assert share == pytest.approx(theirs.score(VAL.embeddings.numpy(), VAL.labels.numpy()))
    assert len(set(found)) == 3, "the counts make no difference"


def write(path: Path, **columns: Any) -> None:
    parquet.write_table(pyarrow.table(columns), path)


def embeddings(*rows: list[float]) -> Any:
    flat = pyarrow.array([number for row in rows for number in row], pyarrow.float32())
    return pyarrow.FixedSizeListArray.from_arrays(flat, 2)


LABELS = pyarrow.array([0, 1], pyarrow.int64())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_bytes(b"PAR1" * 9), "cannot be read as Parquet"),
        (lambda path: None, "there is no file"),
        (lambda path: write(path, label=LABELS), "has the columns label: it needs `label`"),
        (lambda path: write(path, label=LABELS, embedding=[[1.0], [2.0]]), "fixed-size list of float32"),
        (lambda path: write(path, label=LABELS, embedding=embeddings([1, 2], [3, math.nan])), "not finite"),
        (
            lambda path: write(
                path, label=pyarrow.array([0, None], pyarrow.int64()), embedding=embeddings([1, 2], [3, 4])
            ),
            "rows without a label",
        ),
        (
            lambda path: write(
                path, label=pyarrow.array([0, -1], pyarrow.int64()), embedding=embeddings([1, 2], [3, 4])
            ),
            "has labels from -1 to 0: use 0 to 999,999",
        ),
        (lambda path: write(path, label=LABELS[:0], embedding=embeddings()), "has no rows"),
    ],
)
def test_other_files_are_refused(make: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    make(tmp_path / "f.parquet")
    with pytest.raises(DataError, match=words):
        read_features(tmp_path / "f.parquet")


def test_features_are_read_as_they_were_written(tmp_path: Path) -> None:
    with feature_file(tmp_path / "f.parquet", WIDTH, {"weights": "there"}) as file:
        file.add(["a"] * 240, TRAIN.labels.tolist(), TRAIN.embeddings)
    found = read_features(tmp_path / "f.parquet")
    assert torch.equal(found.embeddings, TRAIN.embeddings) and torch.equal(found.labels, TRAIN.labels)
    assert json.dumps(found.about) == '{"weights": "there", "classes": null}'
