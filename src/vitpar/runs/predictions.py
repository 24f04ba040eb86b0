"""Predictions of a run's model for its validation images: computed once, then counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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

    @cached_property
    def _pairs(self) -> tuple[Numbers, Numbers, Numbers]:
        """Distinct pairs of class and predicted class, and how many images have each."""
        pairs, counts = np.unique(self.labels * len(self.class_names) + self.predicted, return_counts=True)
        return pairs // len(self.class_names), pairs % len(self.class_names), counts

    @cached_property
    def errors(self) -> Numbers:
        """Wrong predictions that each class takes part in, as the correct or as the predicted one."""
        wrong = self.labels != self.predicted
        size = len(self.class_names)
        return np.bincount(self.labels[wrong], minlength=size) + np.bincount(self.predicted[wrong], minlength=size)

    def most_confused(self, most: int) -> list[int]:
        """Return the classes that occur, by number; if they are more than `most`, those with the most errors."""
        numbers = np.unique(np.concatenate([self.labels, self.predicted]))
        if len(numbers) > most:
            numbers = np.sort(numbers[np.argsort(-self.errors[numbers], kind="stable")[:most]])
        return numbers.tolist()

    def confusion(self, classes: Sequence[int]) -> Numbers:
        """Return how many images of each of `classes` (rows) are predicted as each of them (columns)."""
        place = np.full(len(self.class_names), -1)
        place[list(classes)] = np.arange(len(classes))
        true, predicted, counts = self._pairs
        kept = (place[true] >= 0) & (place[predicted] >= 0)
        matrix = np.zeros((len(classes), len(classes)), dtype=np.int64)
        matrix[place[true[kept]], place[predicted[kept]]] = counts[kept]
        return matrix

    def classes(self) -> list[ClassResult]:
        """Return the result of every class that has images, the least accurate first."""
        true, predicted, counts = self._pairs
        size = len(self.class_names)
        images = np.bincount(self.labels, minlength=size)
        named = np.bincount(self.predicted, minlength=size)
        right = np.bincount(self.labels[self.labels == self.predicted], minlength=size)
        worst: dict[int, tuple[int, int]] = {}
        for is_, taken_for, number in zip(true.tolist(), predicted.tolist(), counts.tolist(), strict=True):
            if is_ != taken_for and number > worst.get(is_, (0, 0))[0]:
                worst[is_] = number, taken_for
        results = []
        for number in np.flatnonzero(images).tolist():
            confusions, other = worst.get(number, (0, None))
            counted = (int(images[number]), int(right[number]), int(named[number]))
            results.append(ClassResult(number, *counted, other, confusions))
        return sorted(results, key=lambda result: (result.right / result.images, -result.images))

    def mistakes(self, most: int) -> list[int]:
        """Return the rows of wrong predictions, the most confident first."""
        wrong = np.flatnonzero(self.labels != self.predicted)
        return wrong[np.argsort(-self.probability[wrong], kind="stable")[:most]].tolist()

    def drawn(self, number: int) -> list[int]:
        """Return `number` rows, in the order of the images."""
        return drawn_samples(len(self.samples), number)


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
