"""Accuracy of nearest neighbours while a model trains without labels, under any plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import islice

import torch
from torch import Tensor

from vitpar.data.image_files import NotedImages
from vitpar.data.loader import Skipped
from vitpar.data.shards.shard_set import ShardSet
from vitpar.launch.world_group import all_reduce_
from vitpar.models import IGNORED
from vitpar.tasks.image_input import ImageInput
from vitpar.tasks.teacher import Teacher
from vitpar.training.evaluate import Evaluation
from vitpar.training.probe.neighbours import TEMPERATURE, nearest_neighbours
from vitpar.training.probe.read import Features

NEIGHBOURS = 20
"""Neighbours that vote: "usually working the best" in DINO's evaluation."""
COLLAPSED = 0.3
"""Part of the largest deviation of features below which a training has collapsed."""
MOST = 20_000
"""Most training images that are neighbours; of more, evenly spaced ones."""


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
    count = min(NEIGHBOURS, len(there.labels))
    (accuracy,) = nearest_neighbours(there, here, train.num_classes, [count], TEMPERATURE, there.embeddings.device)
    metrics = {"knn": accuracy, "feature_std": _deviation(here.embeddings)}
    return Evaluation(len(here.labels), metrics, Skipped())


def collapse_warning(deviation: float, before: float) -> str | None:
    """Return a sentence if features of different images have become much more alike; else None.

    deviation: that of an evaluation. before: the largest of earlier ones; 0 for none.
    """
    if deviation >= COLLAPSED * before:
        return None
    return (
        f"the training collapses: features of different images deviate by {deviation:.2g}, but by {before:.2g} before: "
        "resume from an earlier checkpoint with a lower optimizer.lr, or a lower task.options.teacher_temp"
    )


def _deviation(features: Tensor) -> float:
    """Return the mean deviation of features of length 1 over images, times the root of their number: 1 at most."""
    x = torch.nn.functional.normalize(features.double(), dim=1)
    return float(x.std(0, correction=0).square().sum().sqrt())


@torch.no_grad()
def _features(
    teacher: Teacher,
    source: ImageInput,
    images: NotedImages,
    progress: Callable[[int], None] = lambda images: None,
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
