"""Predictions of an evaluation: exactly one row for each image under every plan, and their Parquet file."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from helpers.calibration import expected_calibration_error
from helpers.evaluated import BATCH, PLANS, SEED, built, config_of
from helpers.ranks import RankPool
from helpers.small_data import CLASSES, VAL, damage, pack_small
from vitpar import parse
from vitpar.data import EvalTransform, Normalize, ShardSet
from vitpar.data.images import decode
from vitpar.errors import DataError
from vitpar.models import IGNORED
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.training.evaluate import Evaluation, Predictions, _calibration_error, _count, evaluate
from vitpar.training.prediction_file import PredictionFile

Rows = list[tuple[int, int, list[int], list[float]]]
"""Number, label, most probable classes and their probabilities of images."""


def predicted(
    device: torch.device, data: Path, mesh: str, fields: dict[str, Any], bad_sample: str = "fail"
) -> tuple[Rows, Evaluation]:
    """Return all predictions for the validation images, in order, and the result; runs on every rank."""
    model, source = built(device, data, mesh, fields, bad_sample)
    rows: Rows = []

    def add(found: Predictions) -> None:
        columns = (found.samples, found.labels, found.classes, found.probabilities)
        rows.extend(zip(*(column.tolist() for column in columns), strict=True))

    return rows, evaluate(model, source, ShardSet.open(data, "val"), predicted=add)


def by_hand(data: Path) -> Rows:
    """Predict one image after another with the plain model."""
    config = config_of()
    model = LayeredModel(config).eval()
    initialise(model, SEED, config)
    shards = ShardSet.open(data, "val")
    prepare, normalize = EvalTransform(8, crop_pct=1.0), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    rows: Rows = []
    for i in range(len(shards)):
        with torch.no_grad():
            logits = model(normalize(prepare(decode(shards.read(i)))[None]))[0].double().numpy()
        shares = np.exp(logits) / np.exp(logits).sum()
        order = np.argsort(-shares)[:5]
        rows.append((i, shards.label(i), order.tolist(), shares[order].tolist()))
    return rows


def same(found: Rows, expected: Rows) -> bool:
    """Return whether all but the last digits of the probabilities are equal."""
    exact = [[row[:3] for row in rows] for rows in (found, expected)]
    shares = [[share for row in rows for share in row[3]] for rows in (found, expected)]
    return exact[0] == exact[1] and shares[0] == pytest.approx(shares[1], rel=1e-4)


@pytest.mark.parametrize(("mesh", "fields"), [*PLANS, ("dp8", {}), ("tp4+2d", {})], ids=str)
def test_one_row_for_each_image_under_every_plan(
    mesh: str, fields: dict[str, Any], data: Path, ranks: Callable[[int], RankPool]
) -> None:
    """17 images in batches of 8: some ranks see only padding in the last batch."""
    assert VAL % BATCH == 1
    first, *others = ranks(parse(mesh).world_size).run(predicted, data, mesh, fields)
    rows, result = first
    assert same(rows, by_hand(data))
    assert [row[0] for row in rows] == list(range(VAL))
    assert all(more == [] and other == result for more, other in others), "only rank 0 has rows"
    confidence = np.array([row[3][0] for row in rows])
    correct = np.array([row[1] == row[2][0] for row in rows])
    assert result.ece == pytest.approx(expected_calibration_error(confidence, correct), rel=1e-9)
    assert 0 < result.ece < 1


@pytest.mark.parametrize("mesh", ["dp1", "dp2", "pp2"])
def test_unreadable_images_have_no_row(mesh: str, tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    folder = pack_small(tmp_path)
    bad = {3, VAL - 1}
    for sample in bad:
        damage(folder, "val", sample)
    rows, result = ranks(parse(mesh).world_size).run(predicted, folder, mesh, {}, "skip")[0]
    assert [row[0] for row in rows] == [i for i in range(VAL) if i not in bad]
    assert result.samples == len(rows) == VAL - 2 and result.skipped.times == 2


def test_calibration_error_is_that_of_the_formula() -> None:
    """Labels are drawn such that some bins are too confident and others too little, so that the bins matter."""
    draw = np.random.default_rng(0)
    logits = torch.from_numpy(draw.normal(0, 2, (400, CLASSES)))
    shares = logits.softmax(dim=1).numpy()
    labels = torch.tensor([draw.choice(CLASSES, p=row) for row in shares])
    kept = torch.arange(400) % 10 > 0
    sums = _count(logits[:150], labels[:150].where(kept[:150], IGNORED))
    sums += _count(logits[150:], labels[150:].where(kept[150:], IGNORED))
    confidence, correct = shares.max(axis=1), shares.argmax(axis=1) == labels.numpy()
    found = _calibration_error(sums)
    used = kept.numpy()
    assert found == pytest.approx(expected_calibration_error(confidence[used], correct[used]), rel=1e-9)
    for other in (1, 10, 14, 16, 20):
        assert found != pytest.approx(expected_calibration_error(confidence[used], correct[used], other), rel=1e-3)


def found_for(samples: list[int], top: int = 5) -> Predictions:
    """Return predictions for some images, each with other numbers."""
    numbers = torch.tensor(samples)
    shares = torch.linspace(0.9, 0.01, top, dtype=torch.float64) / (numbers[:, None] + 1)
    return Predictions(numbers, numbers % CLASSES, (numbers[:, None] + torch.arange(top)) % CLASSES, shares)


def test_file_is_read_back_in_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitpar.training.prediction_file.GROUP_ROWS", 4)
    path = tmp_path / "p.parquet"
    with PredictionFile(path, 5, {"model": "mine"}) as file:
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
    assert table["top5_classes"].to_pylist() == expected.classes.tolist()
    assert table["top5_probabilities"].to_pylist() == expected.probabilities.tolist()
    assert table["predicted"].to_pylist() == expected.classes[:, 0].tolist()
    assert table["probability"].to_pylist() == expected.probabilities[:, 0].tolist()
    assert json.loads(table.schema.metadata[b"vitpar"]) == {"model": "mine"}


def test_interrupted_file_leaves_nothing_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    path.write_text("old")
    with pytest.raises(RuntimeError), PredictionFile(path, 2, {}) as file:
        file.add("one", ["a"], found_for([0], top=2))
        raise RuntimeError
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["p.parquet"]


def test_missing_pyarrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'vitpar\[parquet\]'"):
        PredictionFile(tmp_path / "p.parquet", 5, {})
