"""Evaluation: exact under every plan, without side effects on training, with calibration and files of predictions."""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from helpers.calibration import expected_calibration_error
from helpers.ranks import Ranks
from helpers.small_data import CLASSES, TRAIN, VAL, damage, pack_small
from vitpar import ViTConfig, model_config, parse, validate
from vitpar.data.images import decode
from vitpar.data.loader import Skipped
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.batch import Normalize
from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import DataError
from vitpar.models import IGNORED
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.parallel import Execution, ParallelModel, parallelize
from vitpar.recipe import read_recipe
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.tasks import LabelSet, task_of
from vitpar.tasks.classify import Classify
from vitpar.tasks.image_input import ImageInput
from vitpar.training.evaluate import Evaluation, Predictions, evaluate
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.parquet_file import ParquetFile, prediction_file

# 17 images make two full batches and one image, so the second of two ranks sees only padding.
BATCH = 8
INTERLEAVED = {"schedule": "interleaved1f1b", "virtual_stages": 2}
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("dp1", {}),
    ("dp1", {"microbatches": 4}),
    ("dp2", {}),
    ("fsdp2", {}),
    ("tp2", {}),
    ("pp2", {}),
    ("pp2", INTERLEAVED),
    ("pp2xdp2", {"microbatches": 2}),
]

SEED = 1
"""Seed whose initial parameters classify at least one image of each split correctly, with every torch version."""


def config_of() -> ViTConfig:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 2, "dropout": 0.2}
    return model_config("vit_custom", num_classes=CLASSES, init="perturbed", **sizes)


def built(
    device: torch.device, data: Path, mesh: str, fields: dict[str, Any], bad_sample: str
) -> tuple[ParallelModel, ImageInput]:
    """Return the model under a plan and its input; runs on every rank."""
    config = config_of()
    plan = validate(replace(parse(mesh), **fields), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, seed=SEED), device)
    options = {"data.path": str(data), "data.bad_sample": bad_sample, "data.crop_pct": 1.0, "data.workers": 0}
    recipe = read_recipe(None, {**options, "train.steps": 1, "train.batch_size": BATCH})
    return model, ImageInput(recipe, model, task_of(recipe, CLASSES))


Rows = list[tuple[int, int, list[int], list[float]]]
"""Number, label, most probable classes and their probabilities of images."""


def evaluated(
    device: torch.device, data: Path, split: str, mesh: str, fields: dict[str, Any], bad_sample: str = "fail"
) -> tuple[Rows, Evaluation]:
    """Return all predictions of the initial parameters, in order, and the result; runs on every rank."""
    model, source = built(device, data, mesh, fields, bad_sample)
    rows: Rows = []

    def add(found: Predictions) -> None:
        columns = (found.samples, found.labels, found.values["top5_classes"], found.values["top5_probabilities"])
        rows.extend(zip(*(column.tolist() for column in columns), strict=True))

    return rows, evaluate(model, source, ShardSet.open(data, split), predicted=add)


def by_hand(data: Path, split: str, without: tuple[str, ...] = ()) -> tuple[Rows, Evaluation]:
    """Evaluate one image after another with the plain model.

    without: names of samples to leave out
    """
    config = config_of()
    model = LayeredModel(config).eval()
    initialise(model, SEED, config)
    shards = ShardSet.open(data, split)
    prepare, normalize = EvalTransform(8, crop_pct=1.0), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    rows: Rows = []
    losses = []
    for i in range(len(shards)):
        if shards.name(i) in without:
            continue
        with torch.no_grad():
            logits = model(normalize(prepare(decode(shards.read(i)))[None]))[0].double().numpy()
        shares = np.exp(logits) / np.exp(logits).sum()
        order = np.argsort(-shares)[:5]
        rows.append((i, shards.label(i), order.tolist(), shares[order].tolist()))
        losses.append(-np.log(shares[shards.label(i)]))
    hits = np.array([[best == label for best in order] for _, label, order, _ in rows])
    ece = expected_calibration_error(np.array([row[3][0] for row in rows]), hits[:, 0])
    metrics = {
        "loss": float(np.mean(losses)),
        "top1": float(hits[:, 0].mean()),
        "top5": float(hits.any(axis=1).mean()),
        "ece": ece,
    }
    return rows, Evaluation(len(rows), metrics, Skipped(len(without)))


def same(found: tuple[Rows, Evaluation], expected: tuple[Rows, Evaluation]) -> bool:
    """Return whether counts and classes are equal, and all other numbers agree up to summation order."""
    counts = [(r.samples, r.skipped.times, r.metrics["top1"], r.metrics["top5"]) for _, r in (found, expected)]
    shares = [[share for row in rows for share in row[3]] for rows, _ in (found, expected)]
    numbers = [
        [r.metrics["loss"], r.metrics["ece"], *more] for (_, r), more in zip((found, expected), shares, strict=True)
    ]
    exact = [[row[:3] for row in rows] for rows, _ in (found, expected)]
    return counts[0] == counts[1] and exact[0] == exact[1] and numbers[0] == pytest.approx(numbers[1], rel=1e-4)


CASES = [("val", mesh, fields) for mesh, fields in [*PLANS, ("dp4", {}), ("tp4+2d", {})]]
CASES += [("train", mesh, fields) for mesh, fields in (PLANS[0], PLANS[-1])]


@pytest.mark.parametrize(("split", "mesh", "fields"), CASES, ids=str)
def test_evaluation_matches_a_plain_loop(
    split: str, mesh: str, fields: dict[str, Any], data: Path, ranks: Ranks
) -> None:
    """Every image counts exactly once although batches are padded, and all ranks get the same result."""
    assert VAL % BATCH == 1, "some ranks see only padding in the last batch"
    expected = by_hand(data, split)
    assert expected[1].samples == (VAL if split == "val" else TRAIN * CLASSES)
    assert 0 < expected[1].metrics["top1"] < expected[1].metrics["top5"] < 1
    first, *others = ranks(parse(mesh).world_size).run(evaluated, data, split, mesh, fields)
    assert same(first, expected), (first, expected)
    assert all(more == [] and other == first[1] for more, other in others), "only rank 0 has rows"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """Return data with two bad validation images, one of them in the last batch, and the names of both."""
    folder = pack_small(tmp_path_factory.mktemp("damaged"))
    return folder, (damage(folder, "val", 3), damage(folder, "val", VAL - 1))


@pytest.mark.parametrize("mesh", ["dp1", "dp2", "tp2", "pp2xdp2"])
def test_skipped_bad_images_count_on_no_rank(mesh: str, damaged: tuple[Path, tuple[str, ...]], ranks: Ranks) -> None:
    folder, names = damaged
    expected = by_hand(folder, "val", without=names)
    assert expected[1].samples == VAL - 2
    first, *others = ranks(parse(mesh).world_size).run(evaluated, folder, "val", mesh, {}, "skip")
    assert same(first, expected), (first, expected)
    for _, result in (first, *others):
        assert same((first[0], result), expected)
        assert result.warning is not None and all(name in result.warning for name in names)


def test_split_with_only_bad_images_is_an_error(tmp_path: Path, alone: None) -> None:
    folder = pack_small(tmp_path)
    for sample in range(VAL):
        damage(folder, "val", sample)
    with pytest.raises(DataError, match=f"none of the {VAL} images of .* could be read"):
        evaluated(torch.device("cpu"), folder, "val", "dp1", {}, "skip")


def trained(device: torch.device, data: Path, mesh: str, fields: dict[str, Any], between: bool) -> list[str]:
    """Return digests of losses, gradients and parameters over three steps; runs on every rank.

    between: evaluate after the first two steps
    """
    model, source = built(device, data, mesh, fields, "fail")
    shards, val = ShardSet.open(data, "train"), ShardSet.open(data, "val")
    optimizer = ShardedOptimizer(model.named_parameters(), OptimizerSection(lr=0.01))
    seen = []
    for step, batch in zip(range(3), source.train_batches(shards), strict=False):
        loss = model.forward_backward(source.images(batch), source.labels(batch), batch.keys)
        gradients = optimizer.gradients()
        tensors = [loss, *(getattr(g, "_local_tensor", g) for g in gradients.values())]
        seen += [hashlib.blake2b(tensor.numpy().tobytes(), digest_size=6).hexdigest() for tensor in tensors]
        optimizer.step(0.01)
        if between and step < 2:
            assert evaluate(model, source, val).samples == VAL
    return seen


@pytest.mark.parametrize(("mesh", "fields"), PLANS[1::2], ids=str)
def test_evaluation_does_not_change_training(mesh: str, fields: dict[str, Any], data: Path, ranks: Ranks) -> None:
    """Losses, gradients and parameters are bitwise equal with and without evaluations between the steps."""
    pool = ranks(parse(mesh).world_size)
    with_evaluation, without = (pool.run(trained, data, mesh, fields, between) for between in (True, False))
    assert with_evaluation == without
    assert len(set(without[-1])) > 3


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


def add(file: ParquetFile, data: str, samples: list[int], top: int = 5) -> None:
    """Append predictions for some images of a data set."""
    found, keys = found_for(samples, top), [f"{data}/{i}" for i in samples]
    file.add([data] * len(keys), found.samples, keys, found.labels, *found.values.values())


def test_file_is_read_back_in_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitpar.training.parquet_file.GROUP_BYTES", 600)
    path = tmp_path / "p.parquet"
    with prediction_file(path, found_for([0]).values, {"model": "mine"}) as file:
        for name, samples in (("one", [0, 1, 2]), ("one", [3, 4]), ("two\udcff", [0])):
            add(file, name, samples)
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
    with pytest.raises(RuntimeError), prediction_file(path, found_for([0], top=2).values, {}) as file:
        add(file, "one", [0], top=2)
        raise RuntimeError
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["p.parquet"]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install -e '\.\[parquet\]'"):
        prediction_file(tmp_path / "p.parquet", {}, {})
