"""Training on streamed shards: recipes, labels on every rank, exact evaluation, and shell commands in URLs."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.command_line import Command, Refused
from helpers.ranks import Ranks
from helpers.run_folder import losses_of, rows_of
from helpers.streamed_shards import brightness, served, write_shards
from helpers.trained import recipe_text
from vitpar import model_config, parse, validate
from vitpar.data.shards.index import Labels, index
from vitpar.errors import DataError, RecipeError
from vitpar.models import IGNORED
from vitpar.parallel import Execution, parallelize
from vitpar.recipe import Recipe, read_recipe
from vitpar.tasks import task_of
from vitpar.tasks.data import open_data
from vitpar.tasks.image_input import ImageInput
from vitpar.training.evaluate import Evaluation, evaluate

CLASSES, BATCH = 4, 8
TRAIN, VAL = (9, 4, 12, 7), (5, 12)
RECIPE: dict[str, Any] = {
    **{"model.num_heads": 2, "data.workers": 1, "data.crop_pct": 1.0, "optimizer.lr": 3e-3, "train.steps": 24},
    **{"train.batch_size": 8, "train.log_every": 1, "stream.samples": 32, "stream.val_samples": 17},
    **{"stream.classes": 4, "stream.shuffle_buffer": 16},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with a recipe that streams its shards from a web server.

    An image's brightness encodes its class.
    """
    folder = tmp_path_factory.mktemp("place")
    assert (write_shards(folder, "train", TRAIN, CLASSES), write_shards(folder, "val", VAL, CLASSES)) == (32, 17)
    with served(folder) as address:
        shards = {"stream.train": f"{address}/train-{{0..3}}.tar", "stream.val": f"{address}/val-{{0..1}}.tar"}
        (folder / "recipe.toml").write_text(recipe_text(**RECIPE, **shards))
        yield folder


# recipes

GIVEN = {"stream.train": "a-{0..3}.tar", "stream.val": "b.tar", "stream.samples": 9, "stream.val_samples": 2}
GIVEN |= {"stream.classes": 2, "train.steps": 1}


def test_streaming_recipe_survives_writing_and_reading(tmp_path: Path) -> None:
    recipe = read_recipe(None, GIVEN | {"stream.train": ("a.tar", "c-{0..1}.tar"), "stream.label": "json:y"})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    assert read_recipe(tmp_path / "recipe.toml") == recipe and recipe.data_name == "a.tar, c-{0..1}.tar"
    train, val = open_data(recipe)
    assert (len(train), len(val), train.num_classes) == (9, 2, 2)
    assert (train.shards, train.labels) == (("a.tar", "c-0.tar", "c-1.tar"), Labels("json", "y"))  # type: ignore[union-attr]
    assert "stream" not in read_recipe(None, {"data.path": "x", "train.steps": 1}).to_toml()


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"stream.val": None}, "the recipe lacks 'stream.val', which streaming needs"),
    ({"data.path": "x"}, "both data.path and stream.train are given: keep one"),
    (
        {"augment.repeats": 2},
        "augment.repeats is 2, which a stream does not support: leave it out, or index the shards",
    ),
    ({"augment.mixup": 0.8}, "augment.mixup is 0.8, which a stream does not support"),
    ({"data.cache": "memory"}, "data.cache is memory, which a stream does not support"),
    ({"data.shuffle_window": 512}, "data.shuffle_window is 512, which a stream does not support"),
]


def test_settings_unsupported_by_streams_are_refused() -> None:
    for change, message in UNSUPPORTED:
        with pytest.raises(RecipeError) as caught:
            read_recipe(None, GIVEN | change)
        assert str(caught.value).startswith(message)


def test_data_path_replaces_a_stream_but_not_within_one_file(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(read_recipe(None, GIVEN).to_toml())
    packed = read_recipe(file, {"data.path": "x"})
    assert packed.data.path == "x" and not packed.stream, "--data replaces the file's stream"
    file.write_text('[data]\npath = "x"\n[stream]\nallow_pipe = true\n[train]\nsteps = 1')
    with pytest.raises(RecipeError, match=r"both data\.path and stream\.allow_pipe are given: keep one"):
        read_recipe(file)
    file.write_text("[stream]\nallow_pipe = true\n[train]\nsteps = 1")
    with pytest.raises(RecipeError, match=r"lacks 'stream\.train', which streaming needs"):
        read_recipe(file)


# input on every rank


def built(device: torch.device, recipe: Recipe, mesh: str) -> tuple[Any, ImageInput]:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 2}
    config = model_config("vit_custom", num_classes=CLASSES, init="perturbed", **sizes)
    model = parallelize(config, validate(parse(mesh), config, BATCH), Execution(BATCH), device)
    return model, ImageInput(recipe, model, task_of(recipe, model.config.num_classes))


def steps_of(device: torch.device, recipe: Recipe, mesh: str) -> list[tuple[list[int], list[int]]]:
    """Return labels and keys of six steps; check that this rank's images match the labels. Runs on every rank."""
    model, source = built(device, recipe, mesh)
    found = []
    with torch.no_grad():
        batches = iter(source.train_batches(open_data(recipe)[0]))
        for _ in range(6):
            images, labels, keys, *_ = source.train_step(next(batches))
            assert (images is not None) == model.takes_images
            if images is not None:
                std, mean = torch.tensor(recipe.data.std), torch.tensor(recipe.data.mean)
                seen = (images.mean((2, 3)) * std + mean).mean(1) * 255
                said = [brightness(int(label), CLASSES) for label in labels[model.image_rows(BATCH)]]
                assert seen.round().int().tolist() == said
            found.append((labels.tolist(), keys.tolist()))
        batches.close()
    return found


@pytest.mark.parametrize("mesh", ["dp1", "fsdp4", "tp2xdp2", "pp2xtp2", "tp4+2d"])
def test_ranks_agree_on_labels_that_match_the_images(mesh: str, place: Path, ranks: Ranks) -> None:
    recipe = read_recipe(place / "recipe.toml")
    first, *others = ranks(parse(mesh).world_size).run(steps_of, recipe, mesh)
    assert all(other == first for other in others)
    assert all(label != IGNORED for labels, _ in first for label in labels)
    keys = [key for _, keys in first for key in keys]
    assert len(set(keys)) == 6 * BATCH and 0 not in keys


def few(device: torch.device, recipe: Recipe, mesh: str) -> str:
    _, source = built(device, recipe, mesh)
    with pytest.raises(DataError) as caught:
        source.train_batches(open_data(recipe)[0])
    return str(caught.value)


@pytest.mark.parametrize(("mesh", "parts"), [("dp2", 2), ("pp2xdp2", 2), ("tp2xdp2", 4)])
def test_fewer_shards_than_decoding_ranks_are_refused_on_every_rank(
    mesh: str, parts: int, place: Path, ranks: Ranks
) -> None:
    recipe = read_recipe(place / "recipe.toml", {"stream.train": f"{place}/train-{{1..{parts - 1}}}.tar"})
    for error in ranks(parse(mesh).world_size).run(few, recipe, mesh):
        assert f"has {parts - 1} shard" in error and f"for the {parts} ranks that decode images, and each" in error


def evaluated(device: torch.device, recipe: Recipe, mesh: str) -> Evaluation:
    model, source = built(device, recipe, mesh)
    return evaluate(model, source, open_data(recipe)[1])


@pytest.mark.parametrize("mesh", ["dp1", "pp2", "tp2xdp2", "dp4"])
def test_streamed_evaluation_equals_that_of_indexed_shards(mesh: str, place: Path, ranks: Ranks) -> None:
    """This includes the case of four decoding ranks and only two shards."""
    if not (place / "dataset.json").exists():
        index(place)
    streaming = read_recipe(place / "recipe.toml")
    indexed = read_recipe(place / "recipe.toml", {"data.path": str(place)})
    (expected,) = ranks(1).run(evaluated, indexed, "dp1")
    results = ranks(parse(mesh).world_size).run(evaluated, streaming, mesh)
    assert (
        all(result == results[0] for result in results)
        and expected.samples == results[0].samples == 17
        and results[0].warning is None
    )
    assert results[0].metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5)
    assert results[0].metrics["top1"] == expected.metrics["top1"]


def test_wrong_sample_count_and_missing_shards_are_reported(place: Path, alone: None) -> None:
    lost = {"stream.val": f"{place}/val-{{0..2}}.tar"}
    recipe = read_recipe(place / "recipe.toml", lost)
    skipping = read_recipe(place / "recipe.toml", lost, ["data.bad_sample=skip"])
    with pytest.raises(DataError, match=r"val-2.tar' cannot be opened: No such file or directory; restore it, or set"):
        evaluated(torch.device("cpu"), recipe, "dp1")
    warning = evaluated(torch.device("cpu"), skipping, "dp1").warning
    assert warning is not None and warning.startswith("1 shard skipped: shard '") and "gave" not in warning
    counted = read_recipe(place / "recipe.toml", {"stream.val_samples": 20})
    result = evaluated(torch.device("cpu"), counted, "dp1")
    assert result.warning == "the stream had 17 images instead of the 20 in the recipe"


# commands


@pytest.fixture(scope="module")
def run(place: Path, vitpar: Command) -> Path:
    """Train on two ranks from the web server, check that the loss falls, and return the run's folder."""
    done = vitpar("train", "--recipe", "recipe.toml", "--mesh", "dp2", "--run-dir", "streamed")
    assert done.returncode == 0, done.stderr
    assert "train-{0..3}.tar: 32 training and 17 validation images" in " ".join(done.stdout.split())
    assert "vitpar eval --checkpoint streamed/weights\n" in done.stdout
    run = place / "streamed"
    losses = losses_of(run)
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert [(row["samples"], row["top1"] > 0.5) for row in rows_of(run, "eval")][-1] == (17, True)
    assert rows_of(run, "train")[-1]["epoch"] == 24 * 8 / 32
    return run


def test_no_command_in_a_recipe_or_url_is_run(
    place: Path, run: Path, vitpar: Command, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither eval nor resume runs a shell command that stands in a checkpoint's recipe unless the user allows it.

    Otherwise downloaded weights could run code. Once allowed, eval repeats the last evaluation of the run.
    """
    recipe, saved = run / "weights" / "recipe.toml", place / "saved" / "step_0"
    settings = {"stream.val": f"pipe:touch {place}/pwned; cat {place}/val-{{0..1}}.tar", "stream.allow_pipe": True}
    recipe.write_text(read_recipe(recipe, settings).to_toml())
    shutil.copytree(sorted((run / "checkpoints").glob("step_*"))[-1], saved)
    (saved / "recipe.toml").write_text(recipe.read_text())
    rows = [
        (["eval", "--checkpoint", str(run / "weights")], "runs a shell command, which is disabled"),
        (["train", "--resume", str(saved), "--run-dir", "on"], "runs a shell command, which is disabled"),
        (
            ["train", "--recipe", "recipe.toml", "--set", f"stream.val=pipe:touch {place}/pwned"],
            "set stream.allow_pipe",
        ),
    ]
    refused(place, rows)
    assert not (place / "pwned").exists()
    monkeypatch.undo()
    done = vitpar(*rows[0][0], "--set", "stream.allow_pipe=true")
    assert done.returncode == 0, done.stderr
    row = rows_of(run, "eval")[-1]
    assert f"17 images of 'val': top-1 {row['top1']:.2%}" in done.stdout and (place / "pwned").exists()
