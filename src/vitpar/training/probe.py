"""Evaluation of a frozen model by its features: linear classifiers, and nearest neighbours, also during a training."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitpar.checkpoint.index import CLASSES, CONFIG, RECIPE
from vitpar.data.image_files import NotedImages
from vitpar.data.loader import Skipped
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError
from vitpar.io import read_text
from vitpar.launch.world_group import all_reduce_
from vitpar.limits import MAX_TOML_BYTES
from vitpar.models import IGNORED, config_to_json
from vitpar.models.config import ModelConfig, field_names
from vitpar.tasks.image_input import ImageInput
from vitpar.tasks.teacher import Teacher
from vitpar.training.evaluate import Evaluation
from vitpar.training.inference import classifiers, feature_width
from vitpar.training.parquet_file import Features
from vitpar.weights.folder import open_weights, write_weights

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
"""Learning rates of DINOv2's linear evaluation (arXiv 2304.07193), for a batch of 256."""
_REFERENCE = 256
"""Batch size that learning rates are for; they grow with it."""
_SPREAD = 0.01
"""Standard deviation of initial weights."""
_CHUNK = 4096
"""Images whose logits are computed at once."""
_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class LinearProbe:
    """Settings of the training: SGD with momentum 0.9 and half a cosine, without augmentation."""

    rates: Sequence[float] = RATES
    """Learning rates for a batch of 256, one for each classifier."""
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 1024
    """Images of a step; at most all of them."""
    weight_decay: float = 0.0
    """L2 penalty of the weights, not of the biases."""
    standardize: bool = False
    """Whether features get mean 0 and variance 1 over the training images, as by the BatchNorm of MAE's probe."""
    seed: int = 0
    """Seed of initial weights and of the order of images."""


@dataclass(frozen=True)
class Probed:
    """A classifier and its accuracy."""

    rate: float
    """Learning rate."""
    weight: Tensor
    """Weights for features that are not standardised, float32 [classes, features]."""
    bias: Tensor
    """Biases, float32 [classes]."""
    train: float
    """Share of the training images that it classifies correctly."""
    val: float
    """Share of the validation images that it classifies correctly."""


def train_classifiers(
    train: Features,
    val: Features,
    classes: int,
    settings: LinearProbe,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Probed]:
    """Train a classifier for each learning rate, and return them in that order.

    classes: outputs of a classifier.
    progress: callback (steps done, steps in total).
    """
    x, labels = train.embeddings.to(device), train.labels.to(device)
    mean, deviation = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    if settings.standardize:
        mean, deviation = x.mean(0), (x.var(0, correction=0) + 1e-6).sqrt()
    generator = torch.Generator().manual_seed(settings.seed)
    rates = torch.tensor(settings.rates, device=device).view(-1, 1, 1)
    weight = torch.randn(classes, x.shape[1], generator=generator).mul_(_SPREAD).to(device)
    weight = weight.expand(len(rates), -1, -1).clone()
    bias = torch.zeros(len(rates), 1, classes, device=device)
    momenta = [torch.zeros_like(weight), torch.zeros_like(bias)]
    size = min(settings.batch_size, len(x))
    batches = len(x) // size
    steps = settings.epochs * batches
    for step in range(steps):
        if step % batches == 0:
            order = torch.randperm(len(x), generator=generator).to(device)
        chosen = order[step % batches * size : (step % batches + 1) * size]
        rows = (x[chosen] - mean) / deviation
        # the gradient of the mean cross-entropy by the logits: softmax - one-hot, over the batch
        slope = torch.softmax(rows @ weight.mT + bias, dim=-1)
        slope -= F.one_hot(labels[chosen], classes)
        slope /= len(rows)
        gradients = slope.mT @ rows + settings.weight_decay * weight, slope.sum(1, keepdim=True)
        rate = rates * (size / _REFERENCE) * (1 + math.cos(math.pi * step / steps)) / 2
        for parameter, momentum, gradient in zip((weight, bias), momenta, gradients, strict=True):
            momentum.mul_(0.9).add_(gradient)
            parameter -= rate * momentum
        progress(step + 1, steps)
    weight /= deviation
    bias = bias[:, 0] - weight @ mean
    shares = [_accuracies(one, weight, bias, device).tolist() for one in (train, val)]
    found = zip(settings.rates, weight.cpu(), bias.cpu(), *shares, strict=True)
    return [Probed(*one) for one in found]


def _accuracies(given: Features, weight: Tensor, bias: Tensor, device: torch.device) -> Tensor:
    """Return the share of images that each classifier gets right, [classifiers]; 0 for one that has diverged."""
    right = torch.zeros(len(weight), dtype=torch.int64, device=device)
    for rows, labels in zip(given.embeddings.split(_CHUNK), given.labels.split(_CHUNK), strict=True):
        logits = rows.to(device) @ weight.mT + bias[:, None]
        right += (logits.argmax(-1) == labels.to(device)).sum(1)
    finite = weight.isfinite().flatten(1).all(1) & bias.isfinite().all(1)
    return right.where(finite, 0) / len(given.labels)


def write_classifier(
    folder: Path, about: Mapping[str, Any], probed: Probed, class_names: Sequence[str] | None
) -> list[Path]:
    """Write the weights that features come from, with the classifier of `probed`, to the new `folder`.

    about: what the file of features says (``vitpar.training.parquet_file``).

    Returns the files of tensors. Raises DataError for features of weights that are gone or do not fit, and
    CheckpointError if `folder` is not empty or cannot be written.
    """
    source = about.get("weights")
    if not isinstance(source, str):
        raise DataError("the file of training features does not name its weights: write it with `vitpar features`")
    there = open_weights(Path(source))
    names, (classes, width) = classifiers(there.config), probed.weight.shape
    if len(names) != 1 or "num_classes" not in field_names(type(there.config)):
        raise DataError(f"{there.config.name} has another classifier than one linear layer: leave --out out")
    if feature_width(there.config) != width:
        raise DataError(f"the weights in '{source}' have {feature_width(there.config)} features, not {width}")
    config: ModelConfig = replace(there.config, num_classes=classes)  # type: ignore[type-var]
    head = f"{config.last_layer.name}.{names[0]}"
    made = {f"{head}.weight": probed.weight, f"{head}.bias": probed.bias}
    shapes = config.shapes

    def read(name: str) -> Tensor:
        return made[name].contiguous() if name in made else there.read(name)

    others = {
        CONFIG: json.dumps(config_to_json(config), indent=1),
        RECIPE: read_text(Path(source) / RECIPE, MAX_TOML_BYTES),
        **({CLASSES: json.dumps(class_names)} if class_names else {}),
    }
    sizes = {name: 4 * torch.Size(shape).numel() for name, shape in shapes.items()}
    return write_weights(folder, sizes, read, others=others, shard_bytes=_SHARD_BYTES)


NEIGHBOURS = (10, 20, 100, 200)
"""Numbers of neighbours of DINO's evaluation."""
TEMPERATURE = 0.07
"""Temperature of the votes in DINO's evaluation."""
_SIMILARITIES = 1 << 26
"""Similarities that are computed at once."""
_VOTING = 20
"""Neighbours that vote: "usually working the best" in DINO's evaluation."""
COLLAPSED = 0.3
"""Part of the largest deviation of features below which a training has collapsed."""
MOST = 20_000
"""Most training images that are neighbours; of more, evenly spaced ones."""


def nearest_neighbours(
    train: Features,
    val: Features,
    classes: int,
    counts: Sequence[int],
    temperature: float,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[float]:
    """Return the share of `val` that its nearest neighbours in `train` classify correctly, for each of `counts`.

    Neighbours are those of the largest cosine similarity s, and each votes for its class with exp(s / temperature).
    Source: "Unsupervised Feature Learning via Non-Parametric Instance Discrimination" (arXiv 1805.01978), DINO's
    eval_knn.py.

    counts: numbers of neighbours, each at most the number of training images.
    progress: callback (images done, images in total).
    """
    known, labels = F.normalize(train.embeddings.to(device)), train.labels.to(device)
    right, done = torch.zeros(len(counts), dtype=torch.int64, device=device), 0
    rows = max(1, _SIMILARITIES // len(known))
    for asked, answers in zip(val.embeddings.split(rows), val.labels.split(rows), strict=True):
        similarities = F.normalize(asked.to(device)) @ known.T
        nearest, places = similarities.topk(max(counts), dim=1)
        votes = (nearest / temperature).exp()
        for number, count in enumerate(counts):
            total = votes.new_zeros(len(votes), classes)
            total.scatter_add_(1, labels[places[:, :count]], votes[:, :count])
            right[number] += (total.argmax(1) == answers.to(device)).sum()
        done += len(asked)
        progress(done, len(val.labels))
    return (right / len(val.labels)).tolist()


def evaluate_neighbours(
    teacher: Teacher,
    source: ImageInput,
    train: ShardSet,
    val: ShardSet,
    progress: Callable[[int], None] = lambda images: None,
) -> Evaluation:
    """Classify `val` by the nearest of the training images, by the features of the teacher. Collective; equal results.

    progress: called with the number of images of `val` seen so far.
    """
    known = NotedImages(train, torch.linspace(0, len(train) - 1, min(len(train), MOST)).long().unique().tolist())
    there, here = _features(teacher, source, known), _features(teacher, source, NotedImages(val), progress)
    count = min(_VOTING, len(there.labels))
    (accuracy,) = nearest_neighbours(there, here, train.num_classes, [count], TEMPERATURE, there.embeddings.device)
    # The mean deviation of features of length 1 over images, times the root of their number: 1 at most.
    deviation = F.normalize(here.embeddings.double(), dim=1).std(0, correction=0).square().sum().sqrt()
    metrics = {"knn": accuracy, "feature_std": float(deviation)}
    return Evaluation(len(here.labels), metrics, Skipped())


def collapse_warning(deviation: float, before: float) -> str | None:
    """Return a sentence if features deviate much less than the most `before`, which is 0 without one; else None."""
    if deviation >= COLLAPSED * before:
        return None
    return (
        f"the training collapses: features of different images deviate by {deviation:.2g}, but by {before:.2g} before: "
        "resume from an earlier checkpoint with a lower optimizer.lr, or a lower task.options.teacher_temp"
    )


@torch.no_grad()
def _features(
    teacher: Teacher, source: ImageInput, images: NotedImages, progress: Callable[[int], None] = lambda images: None
) -> Features:
    """Return the features of class tokens of a set, on every rank. Images that cannot be read are left out."""
    model, done = teacher.model, 0
    rows = torch.tensor(model.output_rows(model.batch_size), dtype=torch.int64, device=model.device)
    found, labels = [], []
    with closing(iter(source.eval_batches(images))) as batches:
        while several := [*islice(batches, teacher.at_once)]:
            mine = teacher.features([source.images(batch) for batch in several])
            for place, batch in enumerate(several):
                table = torch.zeros(model.batch_size, teacher.width, device=model.device)
                if mine is not None and model.first_of_outputs:  # exactly one rank fills each row
                    table[rows] = mine[:, place].float()
                all_reduce_(table)
                there = source.labels(batch)
                found.append(table[there != IGNORED])
                labels.append(there[there != IGNORED])
            done += len(several) * model.batch_size
            progress(min(len(images), done))
    return Features(torch.cat(found), torch.cat(labels), {})
