"""Predictions of a run's model for its validation images: computed once, counted, and shown as HTML with the images."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitpar.data.images import BadImage, decode
from vitpar.runs.charts import percent
from vitpar.runs.pages.document import table
from vitpar.text import count, shown

if TYPE_CHECKING:
    from vitpar.data.image_files import NotedImages
    from vitpar.parallel import ParallelModel
    from vitpar.tasks.image_input import ImageInput

Numbers = NDArray[np.int64]
"""Numbers of images or classes."""
MOST_IMAGES = 200
"""Maximum number of images of a sheet."""
MISTAKES = 12
"""Number of the most confident mistakes that are shown."""
MOST_CLASSES = 20
"""Maximum number of classes of the confusion matrix."""
SHOWN_CLASSES, MOST_ROWS = 20, 1000
"""Classes of the table that are shown at once, and maximum number of its rows."""
SIDE = 96
"""Longest side of a shown image, in pixels."""
TINY = 40
"""Side of images up to which they are stored exactly, and enlarged without blurring."""
SHEET_STYLE = """
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); gap: .6rem; font-size: 12px; }
.sheet figure { margin: 0; } .sheet figcaption { overflow-wrap: anywhere; line-height: 1.35; }
.sheet img { width: 96px; height: 96px; object-fit: contain; background: var(--faint); display: block; }
.sheet img.tiny { image-rendering: pixelated; }
.sheet.pictures { grid-template-columns: repeat(auto-fill, minmax(270px, 1fr)); column-gap: 1.2rem; }
.pictures div { display: flex; gap: 3px; } .pictures img { flex: 1; min-width: 0; height: auto; aspect-ratio: 1; }
.confusion { width: auto; font-size: 12px; } .confusion td { text-align: center; padding: .15rem .4rem;
  border: 1px solid var(--faint); min-width: 1.4rem; } .confusion th { font-weight: normal; text-align: center;
  padding: .15rem .4rem; }
.confusion th:first-child { position: sticky; left: 0; background: var(--page); max-width: 9rem;
  overflow-wrap: anywhere; }
.confusion .right { outline: 1px solid currentColor; outline-offset: -2px; }
"""
"""Rules of style of these sections."""


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


def sheet(predicted_images: PredictedImages, read: Callable[[int], bytes], images: int, about: str) -> str:
    """Return the sections on predictions.

    read: returns the encoded image of a sample, or raises BadImage.
    images: number of images to show.
    about: sentence on the weights and the data.
    """
    mistakes = predicted_images.mistakes(MISTAKES)
    parts = [
        "<h2>Predictions</h2>",
        f"<p>{escape(about)} Top-1 accuracy {percent(predicted_images.accuracy)} on "
        f"{len(predicted_images.samples):,} images.</p>",
        _figures(predicted_images, drawn_samples(len(predicted_images.samples), images), read),
        "<h3>Most confident mistakes</h3>" if mistakes else "<p>No prediction is wrong.</p>",
        _figures(predicted_images, mistakes, read) if mistakes else "",
        "<h3>Confusion matrix</h3>",
        _confusion(predicted_images),
        "<h3>Classes</h3>",
        _classes(predicted_images),
    ]
    return "".join(parts)


def pictures_sheet(shown: Iterable[tuple[float, Mapping[str, NDArray[np.uint8]]]], about: str) -> str:
    """Return the section on validation images with their pictures.

    shown: loss of each image, and its pictures by name, [height, width, 3].
    about: sentences on the pictures, the weights and the data.
    """
    figures, order = [], ""
    for loss, pictures in shown:
        drawn = "".join(thumbnail(pixels, name) for name, pixels in pictures.items())
        figures.append(f"<figure><div>{drawn}</div><figcaption>loss {loss:.4f}</figcaption></figure>")
        order = f"From left to right: {', '.join(pictures)}. "
    return (
        f'<h2>Validation images</h2><p>{escape(order + about)}</p><div class="sheet pictures">{"".join(figures)}</div>'
    )


def thumbnail(pixels: NDArray[np.uint8], name: str = "") -> str:
    """Return an `img` element with a small copy of an image, [height, width, 3], inside. name: alternative text."""
    from PIL import Image

    image, file = Image.fromarray(pixels), io.BytesIO()
    tiny = max(image.size) <= TINY
    if tiny:
        image.save(file, "PNG", optimize=True)
    else:
        image.thumbnail((SIDE, SIDE))
        image.save(file, "JPEG", quality=80)
    kind, text = "png" if tiny else "jpeg", base64.b64encode(file.getvalue()).decode()
    return f'<img src="data:image/{kind};base64,{text}"{" class=tiny" * tiny} alt="{escape(name)}">'


def _figures(predicted_images: PredictedImages, rows: Sequence[int], read: Callable[[int], bytes]) -> str:
    """Return the images of some rows, each with its prediction, and its class if that differs."""
    figures = []
    for row in rows:
        try:
            picture = thumbnail(decode(read(int(predicted_images.samples[row]))))
        except BadImage:  # it has changed since it was predicted
            continue
        label, predicted = int(predicted_images.labels[row]), int(predicted_images.predicted[row])
        words = f"<b>{_name(predicted_images, predicted)}</b>, {predicted_images.probability[row] * 100:.0f} %"
        words += " ✓" if label == predicted else f"<br>✗ label <b>{_name(predicted_images, label)}</b>"
        figures.append(f"<figure>{picture}<figcaption>{words}</figcaption></figure>")
    return f'<div class="sheet">{"".join(figures)}</div>'


def _name(predicted_images: PredictedImages, number: int) -> str:
    """Return the name of a class as HTML."""
    return escape(shown(predicted_images.class_names[number]))


def _confusion(predicted_images: PredictedImages) -> str:
    """Return the confusion matrix as a table. The colour of a cell is its share of the row's images."""
    classes = predicted_images.most_confused(MOST_CLASSES)
    matrix = predicted_images.confusion(classes)
    images = {result.number: result.images for result in predicted_images.classes()}
    heads = "".join(f"<th>{_name(predicted_images, number)}</th>" for number in classes)
    rows = []
    for row, number in enumerate(classes):
        cells = []
        for column, value in enumerate(matrix[row].tolist()):
            share = value / images.get(number, 1)
            shade = f' style="background:rgb(0 114 178/{min(1.0, share) * 0.75:.2f})"' if value else ""
            right = ' class="right"' if row == column else ""
            cells.append(f"<td{right}{shade}>{value or ''}</td>")
        rows.append(f"<tr><th>{_name(predicted_images, number)}</th>{''.join(cells)}</tr>")
    total = len(images)
    cut = f" The {len(classes)} classes with the most errors of {total:,} are shown." if total > len(classes) else ""
    note = (
        f"Rows: classes of the images. Columns: predictions. The stronger the colour, the larger "
        f"the share of the row.{cut}"
    )
    table_ = f'<table class="confusion"><tr><th></th>{heads}</tr>{"".join(rows)}</table>'
    return f'<p class="note">{note}</p><div class="scroll">{table_}</div>'


def _classes(predicted_images: PredictedImages) -> str:
    """Return the table of classes, the least accurate first."""
    results = predicted_images.classes()
    rows = [
        [
            _name(predicted_images, one.number),
            f"{one.images:,}",
            percent(one.right / one.images),
            percent(one.right / one.predicted) if one.predicted else "–",
            "" if one.confused_with is None else f"{_name(predicted_images, one.confused_with)} ({one.confusions:,})",
        ]
        for one in results[:MOST_ROWS]
    ]
    heads = ("class", "images", "accuracy", "precision", "most often taken for")
    first = table(heads, rows[:SHOWN_CLASSES], numbers=slice(1, 4))
    if len(results) <= SHOWN_CLASSES:
        return first
    left = f", {len(results) - MOST_ROWS:,} are left out" if len(results) > MOST_ROWS else ""
    words = f"{count(len(rows) - SHOWN_CLASSES, 'class')} more{left}"
    more = table(heads, rows[SHOWN_CLASSES:], numbers=slice(1, 4))
    return f"{first}<details><summary>{words}</summary>{more}</details>"
