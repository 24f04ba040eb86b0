"""Evaluation: exact under every plan with an incomplete last batch, and without side effects on training."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.evaluated import PLANS, SEED, built, config_of
from helpers.ranks import RankPool
from helpers.small_data import CLASSES, TRAIN, VAL, damage, pack_small
from vitpar import parse
from vitpar.data import EvalTransform, Normalize, ShardSet, Skipped
from vitpar.data.images import decode
from vitpar.errors import DataError
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.training.evaluate import Evaluation, evaluate
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.recipe.sections import OptimizerSection


def evaluated(
    device: torch.device, data: Path, split: str, mesh: str, fields: dict[str, Any], bad_sample: str = "fail"
) -> Evaluation:
    """Return the evaluation of the initial parameters; runs on every rank."""
    model, source = built(device, data, mesh, fields, bad_sample)
    return evaluate(model, source, ShardSet.open(data, split))


def by_hand(data: Path, split: str, without: tuple[str, ...] = ()) -> Evaluation:
    """Evaluate one image after another with the plain model.

    without: names of samples to leave out
    """
    config = config_of()
    model = LayeredModel(config).eval()
    initialise(model, SEED, config)
    shards = ShardSet.open(data, split)
    prepare, normalize = EvalTransform(8, crop_pct=1.0), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    samples = top1 = top5 = 0
    bins: dict[int, list[float]] = {}
    loss = 0.0
    for i in range(len(shards)):
        if shards.name(i) in without:
            continue
        with torch.no_grad():
            logits = model(normalize(prepare(decode(shards.read(i)))[None]))[0].double()
        label = shards.label(i)
        better = int((logits > logits[label]).sum())
        samples, top1, top5 = samples + 1, top1 + (better < 1), top5 + (better < 5)
        loss += float(logits.exp().sum().log() - logits[label])
        confidence = float(logits.exp().max() / logits.exp().sum())
        bins.setdefault(math.ceil(confidence * 15), []).append((better < 1) - confidence)
    ece = sum(abs(sum(differences)) for differences in bins.values()) / samples
    return Evaluation(samples, loss / samples, top1 / samples, top5 / samples, ece, Skipped(len(without)))


def same(result: Evaluation, expected: Evaluation) -> bool:
    """Return whether counts are equal, and the loss and the calibration error agree up to summation order."""
    counts = [replace(r, loss=0, ece=0, skipped=Skipped(r.skipped.times)) for r in (result, expected)]
    measures = [(r.loss, r.ece) for r in (result, expected)]
    return counts[0] == counts[1] and measures[0] == pytest.approx(measures[1], rel=1e-5)


@pytest.mark.parametrize(("mesh", "fields"), PLANS, ids=str)
@pytest.mark.parametrize("split", ["val", "train"])
def test_evaluation_matches_a_plain_loop(
    split: str, mesh: str, fields: dict[str, Any], data: Path, ranks: Callable[[int], RankPool]
) -> None:
    """Every image counts exactly once although batches are padded, and all ranks get the same result."""
    expected = by_hand(data, split)
    assert expected.samples == (VAL if split == "val" else TRAIN * CLASSES)
    assert 0 < expected.top1 < expected.top5 < 1
    results = ranks(parse(mesh).world_size).run(evaluated, data, split, mesh, fields)
    assert all(same(result, expected) for result in results), (results, expected)
    assert len(set(results)) == 1, "ranks disagree"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """Return data with two bad validation images, one of them in the last batch, and the names of both."""
    folder = pack_small(tmp_path_factory.mktemp("damaged"))
    return folder, (damage(folder, "val", 3), damage(folder, "val", VAL - 1))


@pytest.mark.parametrize("mesh", ["dp1", "tp2", "pp2", "pp2xdp2"])
def test_skipped_bad_images_count_on_no_rank(
    mesh: str, damaged: tuple[Path, tuple[str, ...]], ranks: Callable[[int], RankPool]
) -> None:
    folder, names = damaged
    expected = by_hand(folder, "val", without=names)
    assert expected.samples == VAL - 2
    for result in ranks(parse(mesh).world_size).run(evaluated, folder, "val", mesh, {}, "skip"):
        assert same(result, expected), (result, expected)
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


@pytest.mark.parametrize(("mesh", "fields"), [p for p in PLANS if p != ("dp1", {})], ids=str)
def test_evaluation_does_not_change_training(
    mesh: str, fields: dict[str, Any], data: Path, ranks: Callable[[int], RankPool]
) -> None:
    """Losses, gradients and parameters are bitwise equal with and without evaluations between the steps."""
    pool = ranks(parse(mesh).world_size)
    with_evaluation, without = (pool.run(trained, data, mesh, fields, between) for between in (True, False))
    assert with_evaluation == without
    assert len(set(without[-1])) > 3
