"""Loss of hard, smoothed and mixed labels, and its gradients, compared with timm's losses."""

import pytest
import torch
from torch import Tensor

from helpers.oracles import timm
from vitpar import Execution, ParallelModel, model_config, parallelize, parse, validate
from vitpar.models import IGNORED
from vitpar.models.loss import BinaryCrossEntropy, CrossEntropy
from vitpar.tasks.classify import Classify
from vitpar.tasks.task import LabelSet

BATCH, CLASSES = 8, 5
MIXED = (  # label, label of the partner, weight of the first label; None for an ignored image
    (0, 3, 0.8),
    (4, 1, 0.25),
    None,
    (2, 2, 0.6),
    (1, 0, 1.0),
    (3, 4, 0.0),
    None,
    (0, 1, 0.5),
)


def model_of(smoothing: float) -> ParallelModel:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": CLASSES}
    config = model_config("vit_custom", **sizes)
    plan = validate(parse("dp1"), config, BATCH)
    cpu = torch.device("cpu")
    return parallelize(config, plan, Execution(BATCH, precision="fp64"), cpu, CrossEntropy(smoothing))


def logits(*, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(BATCH, CLASSES, generator=generator, dtype=torch.float64)).requires_grad_()


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_mixed_label_loss_matches_timms_soft_targets(smoothing: float, scale: float, alone: None) -> None:
    """The loss sums over the images that are not ignored and divides by the complete batch size."""
    labels = torch.tensor([(IGNORED, IGNORED, 0.7) if row is None else row for row in MIXED], dtype=torch.float64)
    model, found, expected = model_of(smoothing), logits(), logits()
    model.loss_scale = scale
    loss = model.loss(found, labels)
    loss.backward()
    total = torch.zeros((), dtype=torch.float64)
    for number, row in enumerate(MIXED):
        if row is None:
            continue
        first, other, weight = row  # timm mixes a batch with its reverse, so two labels are a batch
        targets = timm.data.mixup.mixup_target(torch.tensor([first, other]), CLASSES, lam=weight, smoothing=smoothing)
        total = total + timm.loss.SoftTargetCrossEntropy()(expected[number : number + 1], targets[:1].double())
    (scale * total / BATCH).backward()
    torch.testing.assert_close(loss, scale * total / BATCH, atol=1e-6 * scale, rtol=1e-6)
    assert found.grad is not None and expected.grad is not None
    torch.testing.assert_close(found.grad, expected.grad, atol=1e-7 * scale, rtol=1e-6)
    gone = [row is None for row in MIXED]
    assert not found.grad[gone].any() and found.grad[[not x for x in gone]].any(1).all()


@pytest.mark.parametrize(
    ("smoothing", "threshold", "summed", "positive"),
    [(0.0, None, False, 1.0), (0.1, None, True, 3.0), (0.0, 0.0, False, 1.0), (0.1, 0.2, True, 1.0)],
)
@pytest.mark.parametrize("weights", [(), (0.5, 1.0, 2.0, 0.0, 1.5)], ids=["", "weights"])
@pytest.mark.parametrize("mixed", [False, True], ids=["hard", "mixed"])
def test_binary_cross_entropy_matches_timms(
    smoothing: float, threshold: float | None, summed: bool, positive: float, weights: tuple[float, ...], mixed: bool
) -> None:
    found, expected = logits(seed=2), logits(seed=2)
    loss = BinaryCrossEntropy(smoothing, weights, summed, threshold, positive)
    given = {"weight": torch.tensor(weights).double() if weights else None, "pos_weight": torch.tensor(positive)}
    other = timm.loss.BinaryCrossEntropy(smoothing, threshold, sum_classes=summed, **given)
    rows = [(label, label, 1.0) for label in (0, 3, 2, 2, 4, 1, 0, 4)]
    if mixed:
        rows = [row or (1, 4, 0.3) for row in MIXED]
    each: list[Tensor] = []
    for number, (first, second, weight) in enumerate(rows):
        targets = torch.tensor([first])
        if mixed:
            targets = timm.data.mixup.mixup_target(
                torch.tensor([first, second]), CLASSES, lam=weight, smoothing=smoothing
            )
        each.append(other(expected[number : number + 1], targets[:1]))
    total = torch.stack(each).double().sum()
    labels = torch.tensor(rows, dtype=torch.float64) if mixed else torch.tensor([row[0] for row in rows])
    one = loss.total(found, labels)
    one.backward()
    total.backward()
    torch.testing.assert_close(one, total, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.grad, expected.grad, atol=1e-6, rtol=1e-6)
    labels[2] = IGNORED
    torch.testing.assert_close(loss.total(logits(seed=2), labels), total - each[2], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_are_those_of_torchs_loss(smoothing: float) -> None:
    weights, labels = (0.5, 1.0, 2.0, 0.0, 1.5), torch.tensor([0, 3, IGNORED, 2, 2, IGNORED, 4, 1])
    ours, torchs = (
        CrossEntropy(smoothing, weights),
        {"weight": torch.tensor(weights).double(), "label_smoothing": smoothing},
    )
    expected = torch.nn.CrossEntropyLoss(ignore_index=IGNORED, **torchs)(logits(), labels)
    torch.testing.assert_close(ours.total(logits(), labels) / ours.count(labels, BATCH), expected)
    rows = torch.tensor([row or (1, 4, 0.3) for row in MIXED], dtype=torch.float64)
    one, two = (torch.nn.functional.one_hot(rows[:, place].long(), CLASSES) for place in (0, 1))
    soft = rows[:, 2:] * one + (1 - rows[:, 2:]) * two
    expected = torch.nn.CrossEntropyLoss(**torchs)(logits(), soft)
    torch.testing.assert_close(ours.total(logits(), rows) / ours.count(rows, BATCH), expected)
    nothing = torch.full((BATCH,), IGNORED)
    assert (ours.total(logits(), nothing) / ours.count(nothing, BATCH)).item() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_weights": [1.0]}, "class_weights has 1 numbers for 5 classes"),
        ({"class_weights": [0.0] * CLASSES}, "one of them larger"),
        ({"class_weights": [1.0, 1.0, 1.0, 1.0, float("nan")]}, "class_weights must be finite"),
        ({"class_weights": [1.0, 1.0, 1.0, -1.0, 1.0]}, "class_weights must be finite"),
        ({"bce": True, "bce_target_threshold": 1.0}, "bce_target_threshold is 1.0"),
        ({"bce": True, "bce_positive_weight": 0.0}, "not a positive number"),
        ({"bce_sum": True}, "without bce = true"),
    ],
)
def test_wrong_options_of_the_loss_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Classify(labels=LabelSet(CLASSES), **options)
