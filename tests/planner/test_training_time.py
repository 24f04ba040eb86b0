"""Duration of a complete training: steps and images by the recipe, days and device-hours by a price."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vitpar.planner.training_time import HostInput, figure, training_length, training_time
from vitpar.strategy import parse
from vitpar.training.recipe import Recipe, read_recipe


def recipe(**settings: Any) -> Recipe:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return read_recipe(None, {"data.path": "not/here", **named}, needs_length=False)


def priced(batch_size: int, seconds: float) -> Any:
    return SimpleNamespace(plan=parse("dp8"), batch_size=batch_size, seconds=seconds)


def test_days_and_device_hours_are_those_of_all_steps() -> None:
    length = training_length(recipe(train__epochs=90))
    found = training_time(priced(1000, 0.5), length)
    assert found.steps == math.ceil(90 * 1_281_167 / 1000) == 115_306
    assert found.images == 115_306_000
    assert found.days == pytest.approx(115_306 * 0.5 / 86_400)
    assert found.device_hours == pytest.approx(115_306 * 0.5 * 8 / 3600)
    assert "ImageNet-1k's 1,281,167 images are assumed" in found.assumed
    words = found.words("GPU-hours")
    assert words.startswith("16.0 hours, 128 GPU-hours: 115,306 steps, 90 epochs of 1,281,167 samples")
    assert words.endswith("; input, evaluation and checkpoints not included")
    # Twice the batch: half the steps, as many images.
    assert training_time(priced(2000, 0.5), length).steps == 57_653


@pytest.mark.parametrize(("rate", "devices", "step"), [(1000, 8, 1.0), (1000, 4, 0.5), (1000, 3, 0.5), (9e9, 8, 0.5)])
def test_steps_wait_for_the_input_of_their_machines(rate: float, devices: int, step: float) -> None:
    length = training_length(recipe(train__steps=500), hosts=HostInput(rate, devices))
    found = training_time(priced(1000, 0.5), length)
    assert found.seconds == 500 * step and found.waiting == pytest.approx(1 - 0.5 / step)
    assert found.words("GPU-hours").endswith("; evaluation and checkpoints not included")
    assert found.conditions == {"waiting": "50%" if step > 0.5 else "0%"}


def test_length_in_steps_assumes_nothing() -> None:
    found = training_time(priced(1024, 2.0), training_length(recipe(train__steps=500)))
    assert (found.steps, found.images, found.seconds, found.assumed) == (500, 512_000, 1000.0, "")
    assert found.words("GPU-hours").startswith("16.7 minutes, 2.22 GPU-hours: 500 steps, 512,000 samples")


def test_recipe_without_length_has_the_default_epochs() -> None:
    length = training_length(recipe())
    assert (length.recipe.train.epochs, length.samples) == (300, 1_281_167)
    assert length.assumed == (
        "300 epochs of ImageNet-1k's 1,281,167 images are assumed: give others with --epochs and --data"
    )
    of_text = training_length(recipe(task__name="mlm", model__name="bert_base"))
    assert "40 epochs of BERT's 6,400,000 sequences are assumed" in of_text.assumed
    assert training_length(recipe(task__name="mae", model__name="mae_vit_base")).recipe.train.epochs == 800


def test_images_are_those_of_the_data(tmp_path: Path) -> None:
    stream = {"train": "s3/{0..9}.tar", "val": "v.tar", "samples": 50_000, "val_samples": 9, "classes": 10}
    streamed = read_recipe(None, {**{f"stream.{key}": value for key, value in stream.items()}, "train.epochs": 2})
    length = training_length(streamed)
    assert (length.samples, length.steps(1000), length.assumed) == (50_000, 100, "")


@pytest.mark.parametrize(
    ("number", "words"), [(0.01234, "0.0123"), (1.2, "1.20"), (99.94, "99.9"), (99.96, "100"), (12_345.6, "12,346")]
)
def test_figures_have_three_digits(number: float, words: str) -> None:
    assert figure(number) == words
