"""Calibration error, and the Parquet file of predictions."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from helpers.calibration import expected_calibration_error
from helpers.small_data import CLASSES
from vitpar.errors import DataError
from vitpar.models import IGNORED
from vitpar.tasks import LabelSet
from vitpar.tasks.classify import Classify
from vitpar.training.evaluate import Predictions
from vitpar.training.prediction_file import PredictionFile


def test_calibration_error_is_that_of_the_formula() -> None:
    """LabelSet are drawn such that some bins are too confident and others too little, so that the bins matter."""
    draw = np.random.default_rng(0)
    logits = torch.from_numpy(draw.normal(0, 2, (400, CLASSES)))
    shares = logits.softmax(dim=1).numpy()
    labels = torch.tensor([draw.choice(CLASSES, p=row) for row in shares])
    kept = torch.arange(400) % 10 > 0
    task = Classify(LabelSet(CLASSES))
    sums = task.sums(logits[:150], labels[:150].where(kept[:150], IGNORED))
    sums += task.sums(logits[150:], labels[150:].where(kept[150:], IGNORED))
    confidence, correct = shares.max(axis=1), shares.argmax(axis=1) == labels.numpy()
    found = task.result(sums)["ece"]
    used = kept.numpy()
    assert found == pytest.approx(expected_calibration_error(confidence[used], correct[used]), rel=1e-9)
    for other in (1, 10, 14, 16, 20):
        assert found != pytest.approx(expected_calibration_error(confidence[used], correct[used], other), rel=1e-3)


def found_for(samples: list[int], top: int = 5) -> Predictions:
    """Return predictions for some images, each with other numbers."""
    numbers = torch.tensor(samples)
    shares = torch.linspace(0.9, 0.01, top, dtype=torch.float64) / (numbers[:, None] + 1)
    classes = (numbers[:, None] + torch.arange(top)) % CLASSES
    values = {"predicted": classes[:, 0], "probability": shares[:, 0]}
    values |= {"top5_classes": classes, "top5_probabilities": shares}
    return Predictions(numbers, numbers % CLASSES, values)


def test_file_is_read_back_in_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitpar.training.prediction_file.GROUP_ROWS", 4)
    path = tmp_path / "p.parquet"
    with PredictionFile(path, found_for([0]).values, {"model": "mine"}) as file:
        for name, samples in (("one", [0, 1, 2]), ("one", [3, 4]), ("two\udcff", [0])):
            file.add(name, [f"{name}/{i}" for i in samples], found_for(samples))
            assert not path.exists()
    read = parquet.ParquetFile(path)
    assert [read.metadata.row_group(i).num_rows for i in range(read.num_row_groups)] == [5, 1]
    table = read.read()
    assert table["data"].to_pylist() == ["one"] * 5 + ["two\\udcff"]
    assert table["index"].to_pylist() == [0, 1, 2, 3, 4, 0] and table["key"].to_pylist()[3] == "one/3"
    expected = found_for([0, 1, 2, 3, 4, 0])
    assert table["label"].to_pylist() == expected.labels.tolist()
    assert table["top5_classes"].to_pylist() == expected.values["top5_classes"].tolist()
    assert table["top5_probabilities"].to_pylist() == expected.values["top5_probabilities"].tolist()
    assert table["predicted"].to_pylist() == expected.values["predicted"].tolist()
    assert table["probability"].to_pylist() == expected.values["probability"].tolist()
    assert json.loads(table.schema.metadata[b"vitpar"]) == {"model": "mine"}


def test_interrupted_file_leaves_nothing_and_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.parquet"
    path.write_text("old")
    with pytest.raises(RuntimeError), PredictionFile(path, found_for([0], top=2).values, {}) as file:
        file.add("one", ["a"], found_for([0], top=2))
        raise RuntimeError
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["p.parquet"]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install -e '\.\[parquet\]'"):
        PredictionFile(tmp_path / "p.parquet", 5, {})
