"""Warning about slow input, and the preview image of the training samples."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from helpers.tiny_images import write_tree
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.recipe import Recipe
from vitpar.tasks.data import are_small, decoding_threads
from vitpar.training.metrics import WATCHED_STEPS, InputWatch
from vitpar_cli.data import app


def rows(first: int, count: int, data: float) -> list[dict]:
    return [{"step": step, "data_ms": data, "step_ms": 100.0} for step in range(first, first + count)]


def recipe_of(**sections: dict[str, object]) -> Recipe:
    least: dict[str, object] = {"data": {"path": "unused"}, "train": {"batch_size": 8, "steps": 1}}
    return Recipe.model_validate(least | sections)


def test_slow_input_is_reported_once_with_a_remedy() -> None:
    watch = InputWatch(recipe_of(), workers=2, cores=8)
    assert watch.look([{"step": 1, "data_ms": 9000.0, "step_ms": 9000.0}, *rows(2, WATCHED_STEPS - 1, 40)]) is None
    words = watch.look(rows(WATCHED_STEPS + 1, 5, 40))
    assert words == (
        "training waits for images 40% of the time (about 4 decoding threads a rank would keep up): raise data.workers "
        "(it is 2, and a rank has 8 cores here)"
    )
    assert watch.look(rows(90, 50, 90)) is None
    words = InputWatch(recipe_of(), 8, 8).look(rows(2, WATCHED_STEPS, 50))
    assert words is not None and "8 decoding threads on 8 cores" in words and "--short-side" in words
    assert InputWatch(recipe_of(), 2, 8).look(rows(1, 500, 10)) is None, "the input is fast"


PACK = "pack smaller images (`vitpar data pack --short-side`)"
CACHE = "set data.cache to memory, or to device if all have one size"
STREAM = {"train": "a.tar", "val": "b.tar", "samples": 8, "val_samples": 8, "classes": 2}


@pytest.mark.parametrize(
    ("sections", "small", "remedies"),
    [
        ({"augment": {"policy": "3a"}}, False, f"{PACK}, {CACHE}, augment less or use more cores"),
        ({}, False, f"{PACK}, {CACHE} or use more cores"),
        ({"data": {"path": "unused", "cache": "memory"}}, False, f"{PACK} or use more cores"),
        ({"data": {}, "stream": STREAM}, False, "use more cores"),
        ({}, True, CACHE),
        ({"data": {"path": "unused", "cache": "memory"}}, True, "set data.cache to device if all images have one size"),
    ],
)
def test_slow_input_suggests_only_what_helps_and_is_not_done_yet(
    sections: dict[str, dict[str, object]], small: bool, remedies: str
) -> None:
    """Small images do not want more threads."""
    words = InputWatch(recipe_of(**sections), 1, 0.25, small=small).look(rows(2, WATCHED_STEPS, 100))
    threads = "" if small else ", with 1 decoding thread on 0.25 cores a rank"
    assert words == f"training waits for images 100% of the time{threads}: {remedies}"


@pytest.mark.parametrize(
    ("device", "cores", "threads"),
    [("cuda", 16, 15), ("cuda", 24, 16), ("cuda", 1, 1), ("cuda", 12.5, 11), ("cpu", 16, 2), ("cpu", 0.25, 1)],
)
def test_decoding_threads_follow_the_cores_of_a_rank(device: str, cores: float, threads: int) -> None:
    recipe = recipe_of()
    assert decoding_threads(recipe, device, cores, small=False) == threads
    assert decoding_threads(recipe, device, cores, small=True) == 1
    held = recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache": "device"})})
    assert decoding_threads(held, device, cores, small=True) == (1 if device == "cpu" else threads)
    assert "workers" not in recipe.to_toml()
    named = recipe.model_copy(update={"data": recipe.data.model_copy(update={"workers": 0})})
    assert decoding_threads(named, device, cores, small=True) == 0


@pytest.mark.parametrize(("side", "small"), [(96, True), (97, False)])
def test_small_images_are_known_by_their_stored_size(side: int, small: bool, tmp_path: Path) -> None:
    (tmp_path / "images" / "only").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (side, 96)).save(tmp_path / "images" / "only" / f"{number}.png")
    pack(tmp_path / "images", tmp_path / "packed", val_fraction=0)
    assert are_small(ShardSet.open(tmp_path / "packed", "train")) is small
    assert not are_small(object()), "a stream"


def test_preview_shows_samples_and_their_augmentations(tmp_path: Path) -> None:
    write_tree(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed")
    recipe = ["--set", "model.image_size=8", "--set", "model.patch_size=4"]
    for number, more in enumerate(([], ["--set", "augment.policy=rand-p1"], ["--set", "augment.mixup=1.0"])):
        path = tmp_path / f"{number}.png"
        words = ["info", str(tmp_path / "packed"), "--preview", str(path), *recipe, *more]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0 and "bee" in done.output
    sheets = [np.asarray(Image.open(tmp_path / f"{number}.png")).astype(int) for number in range(3)]
    assert sheets[0].shape == sheets[1].shape and sheets[0].shape[1] == 8 * 68 + 4
    first, others = np.s_[:, :68], np.s_[:, 68:]
    for sheet in sheets[1:]:
        assert np.array_equal(sheets[0][first], sheet[first])
        assert np.abs(sheets[0][others] - sheet[others]).max() > 50
