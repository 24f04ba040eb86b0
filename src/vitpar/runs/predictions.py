"""Predictions of a run's model for its validation images: computed once, then counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vitpar.data.image_files import NotedImages
    from vitpar.parallel import ParallelModel
    from vitpar.tasks.image_input import ImageInput

Numbers = NDArray[np.int64]
"""Numbers of images or classes."""


@dataclass(frozen=True)
class ClassResult:
    """Result of a class."""

    number: int
    """Number of the class."""
    images: int
    """Images of the class."""
    right: int
    """Images of the class that were predicted as such."""
    predicted: int
    """Images that were predicted as the class."""
    confused_with: int | None
    """Class that its images are taken for most often; None if all are right."""
    confusions: int
    """Images of the class that are taken for that one."""


@dataclass(frozen=True)
class PredictedImages:
    """Most probable class of every image that could be read."""

    samples: Numbers
    """Number of each image in its set."""
    labels: Numbers
    """Class of each image."""
    predicted: Numbers
    """Most probable class of each image."""
    probability: NDArray[np.float64]
    """Probability of that class."""
    class_names: Sequence[str]
    """Names of all classes."""

    def __post_init__(self) -> None:
        most = max(self.labels.max(initial=0), self.predicted.max(initial=0))
        assert most < len(self.class_names), f"class {most} has no name"

    @property
    def accuracy(self) -> float:
        """Fraction of images with the correct class first."""
        return float((self.labels == self.predicted).mean()) if len(self.labels) else 0.0

    def most_confused(self, most: int) -> list[int]:
        """Return the classes that occur, by number; if they are more than `most`, those with the most errors."""
        numbers = np.unique(np.append(self.labels, self.predicted))
        if len(numbers) > most:
            wrong = self.labels != self.predicted
            errors = np.bincount(np.append(self.labels[wrong], self.predicted[wrong]), minlength=len(self.class_names))
            numbers = np.sort(numbers[np.argsort(-errors[numbers], kind="stable")[:most]])
        return numbers.tolist()

    def confusion(self, classes: Sequence[int]) -> Numbers:
        """Return how many images of each of `classes` (rows) are predicted as each of them (columns)."""
        place = np.full(len(self.class_names), -1)
        place[list(classes)] = np.arange(len(classes))
        rows, columns = place[self.labels], place[self.predicted]
        kept = (rows >= 0) & (columns >= 0)
        matrix = np.zeros((len(classes),) * 2, dtype=np.int64)
        np.add.at(matrix, (rows[kept], columns[kept]), 1)
        return matrix

    def classes(self) -> list[ClassResult]:
        """Return the result of every class that has images, the least accurate first."""
        named = np.bincount(self.predicted, minlength=len(self.class_names)).tolist()
        order = np.argsort(self.labels, kind="stable")
        numbers, starts = np.unique(self.labels[order], return_index=True)
        results = []
        for number, predicted in zip(numbers.tolist(), np.split(self.predicted[order], starts[1:]), strict=False):
            others, counts = np.unique(predicted[predicted != number], return_counts=True)
            most = counts.argmax() if len(counts) else None
            confused = (None, 0) if most is None else (int(others[most]), int(counts[most]))
            right = len(predicted) - int(counts.sum())
            results.append(ClassResult(number, len(predicted), right, named[number], *confused))
        return sorted(results, key=lambda result: (result.right / result.images, -result.images))

    def mistakes(self, most: int) -> list[int]:
        """Return the rows of wrong predictions, the most confident first."""
        wrong = np.flatnonzero(self.labels != self.predicted)
        return wrong[np.argsort(-self.probability[wrong], kind="stable")[:most]].tolist()


def drawn_samples(total: int, number: int) -> list[int]:
    """Return `number` samples out of `total`, the same in every report, in order."""
    return np.sort(np.random.default_rng(0).permutation(total)[:number]).tolist()


def predict(
    model: ParallelModel,
    source: ImageInput,
    images: NotedImages,
    class_names: Sequence[str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PredictedImages:
    """Predict the classes of all images. Those that cannot be read are left out.

    model: on one rank.
    progress: callback (images done, images in total).

    Raises DataError as ``vitpar.training.inference.outputs`` does.
    """
    from vitpar.training.inference import outputs

    samples: list[int] = []
    best, shares = [np.empty(0, dtype=np.int64)], [np.empty(0)]
    for batch in outputs(model, source, images, progress=progress):
        share, number = batch.logits.double().softmax(dim=1).max(dim=1)
        samples += batch.samples
        best.append(number.numpy())
        shares.append(share.numpy())
    rows = np.array(samples, dtype=np.int64)
    labels = np.asarray(images.labels)[rows].astype(np.int64)
    return PredictedImages(rows, labels, np.concatenate(best), np.concatenate(shares), tuple(class_names))
