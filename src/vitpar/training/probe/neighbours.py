"""Classification of images by their nearest neighbours among the features of training images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from vitpar.training.probe.read import Features

NEIGHBOURS = (10, 20, 100, 200)
"""Numbers of neighbours of DINO's evaluation."""
TEMPERATURE = 0.07
"""Temperature of the votes in DINO's evaluation."""
_SIMILARITIES = 1 << 26
"""Similarities that are computed at once."""


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
