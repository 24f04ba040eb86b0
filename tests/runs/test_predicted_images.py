"""Predictions counted: confusion matrix, classes, mistakes; and their page."""

import io

import numpy as np
import pytest
from PIL import Image

from helpers.html_pages import Page
from vitpar.data.images import BadImage
from vitpar.runs.predictions import ClassResult, PredictedImages, drawn_samples, sheet

LABELS = [0, 0, 0, 1, 1, 2]
PREDICTED = [0, 1, 1, 1, 2, 2]
SHARES = [0.9, 0.6, 0.8, 0.7, 0.99, 0.5]


def found_with(labels: list[int], predicted: list[int], shares: list[float], names: tuple[str, ...]) -> PredictedImages:
    columns = [np.array(labels, dtype=np.int64), np.array(predicted, dtype=np.int64), np.array(shares)]
    return PredictedImages(np.arange(len(labels)) * 10, *columns, names)


@pytest.fixture
def found() -> PredictedImages:
    return found_with(LABELS, PREDICTED, SHARES, ("cat", "dog", "cow", "unused"))


def encoded(width: int = 4, height: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 60)).save(file, "PNG")
    return file.getvalue()


def test_predictions_are_counted_and_sorted(found: PredictedImages) -> None:
    assert found.confusion([0, 1, 2]).tolist() == [[1, 2, 0], [0, 1, 1], [0, 0, 1]]
    assert found.confusion([2, 0]).tolist() == [[1, 0], [0, 1]]
    assert found.accuracy == 0.5 and found.most_confused(3) == [0, 1, 2]
    assert found.most_confused(2) == [0, 1], "those with the most errors: 2 and 3 against 1"
    assert found.classes() == [
        ClassResult(0, images=3, right=1, predicted=1, confused_with=1, confusions=2),
        ClassResult(1, images=2, right=1, predicted=3, confused_with=2, confusions=1),
        ClassResult(2, images=1, right=1, predicted=2, confused_with=None, confusions=0),
    ]
    assert found.mistakes(2) == [4, 2] and found.mistakes(9) == [4, 2, 1], "the most confident first"
    drawn = drawn_samples(6, 4)
    assert drawn == sorted(set(drawn)) == drawn_samples(6, 4) and len(drawn) == 4
    assert drawn_samples(6, 100) == list(range(6))


def test_the_sheet_shows_images_with_prediction_and_label(found: PredictedImages) -> None:
    read: list[int] = []

    def reader(sample: int) -> bytes:
        read.append(sample)
        if sample == 20:
            raise BadImage("it is damaged")
        return encoded()

    page = Page(sheet(found, reader, 6, "By the weights of x."))
    assert read == [0, 10, 20, 30, 40, 50, 40, 20, 10] and len(page.all("img")) == 7
    assert "cat , 90 % ✓" in page.text and "dog , 60 % ✗ label cat" in page.text
    assert "Top-1 accuracy 50.0 % on 6 images." in page.text and "unused" not in page.text
    assert "cat 3 33.3 % 100.0 % dog (2) dog 2 50.0 % 33.3 % cow (1)" in page.text
    assert page.outside == []


def test_names_of_classes_are_escaped_and_no_mistake_is_said() -> None:
    hostile = "<script>alert(1)</script>"
    page = Page(sheet(found_with([0, 1], [1, 1], [0.5, 0.5], (hostile, "b")), lambda _: encoded(), 2, hostile))
    assert not page.all("script") and page.text.count(hostile) >= 5
    words = Page(sheet(found_with([0, 1], [0, 1], [1.0, 1.0], ("a", "b")), lambda _: encoded(), 1, "")).text
    assert "No prediction is wrong." in words and "Most confident mistakes" not in words
