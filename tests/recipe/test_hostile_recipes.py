"""Recipes from untrusted sources: oversized or malformed input is refused quickly, with a short error."""

import os
from pathlib import Path

import numpy as np
import pytest

from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import RecipeError, UserError
from vitpar.limits import MAX_QUOTED_CHARS, MAX_TOML_BYTES
from vitpar.recipe import Recipe, read_recipe
from vitpar.tasks.data import transforms

pytestmark = pytest.mark.timeout(20)
NINES = "9" * 5_000


def read(path: Path | None, *assignments: str) -> Recipe:
    return read_recipe(path, {"data.path": "here", "train.steps": 1}, assignments)


def refused(path: Path | None, message: str, *assignments: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(path, *assignments)
    said = str(caught.value)
    assert len(said) < 2 * MAX_QUOTED_CHARS + 400 and "\n" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 200_000, "not valid TOML: it is nested too deeply"),
        (f"[train]\nsteps = {NINES}", "not valid TOML: Exceeds the limit"),
        ("#" * (MAX_TOML_BYTES + 1), "it has more than 262,144 bytes"),
    ],
)
def test_oversized_or_deeply_nested_toml_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    refused(path, message)


def test_recipe_paths_that_are_not_regular_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    refused(Path("/dev/zero"), "cannot be read: it is not a regular file")
    refused(tmp_path, "cannot be read: it is a folder")
    refused(tmp_path / ("x" * 5_000), "cannot be read: File name too long")
    os.mkfifo(path)
    refused(path, "cannot be read: it is not a regular file")


@pytest.mark.parametrize("assignment", ['augment.policy="\ud800"', "data.path=b\udcff", 'stream.train=["a\udcff.tar"]'])
def test_non_utf8_assignments_are_refused(assignment: str) -> None:
    with pytest.raises(RecipeError, match=r"which is not UTF-8: write it in UTF-8") as refused:
        read_recipe(None, {"train.steps": 1}, [assignment])
    assert str(refused.value).encode()


# augmentation


def test_resize_is_limited_for_tiny_crop_pct_and_long_images() -> None:
    with pytest.raises(RecipeError, match="crop_pct 1e-05 resizes images of 224 pixels to more than 16,384"):
        transforms(read(None, "data.crop_pct=0.00001"), 224)
    stripe = np.zeros((1, 65_535, 3), np.uint8)
    assert EvalTransform(224)(stripe).shape == (3, 224, 224)
    assert EvalTransform(224)(np.zeros((100, 4_000, 3), np.uint8)).shape == (3, 224, 224)
