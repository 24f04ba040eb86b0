"""Default settings and the reference of all settings: their tables, and the pages that show them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vitpar.data.transforms.policies import parse_policy
from vitpar.errors import ModelError, RecipeError
from vitpar.intervals import Interval
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.defaults import MAX_LR, ROWS, default_model, recipe_for, row_for, with_defaults
from vitpar.recipe.reference import find, settings
from vitpar.tasks.data import transforms
from vitpar_cli.main import app

HERE = {"data.path": "x"}
STREAM = {
    "stream.train": "a",
    "stream.val": "b",
    "stream.samples": 50_000,
    "stream.val_samples": 9,
    "stream.classes": 4,
}
SIZES = (60, 1_437, 50_000, 126_689, 1_281_167, 13_000_000, 300_000_000)


def test_rows_are_in_order_and_have_sources() -> None:
    most = [row.most or math.inf for row in ROWS]
    assert most == sorted(set(most)) and most[-1] == math.inf
    assert all(re.search(r"\(\d{4}\.\d{5}", row.sources) for row in ROWS)
    assert [row_for(samples).example for samples in (10_000, 10_001, 10**9)] == [
        *("Flowers-102", "CIFAR, Tiny-ImageNet", "JFT-300M")
    ]


@pytest.mark.parametrize(("model", "source"), [("vit_tiny_patch4_32", HERE), ("vit_large_patch16_224", STREAM)])
def test_every_row_gives_a_complete_recipe(model: str, source: dict[str, Any], tmp_path: Path) -> None:
    for samples in SIZES:
        recipe = recipe_for(samples, {**source, "model.name": model})
        transforms(recipe, recipe.config(10).image_size)
        assert recipe.augment.policy is None or parse_policy(recipe.augment.policy)
        assert recipe.train.epochs and recipe.lr_schedule.warmup
        assert 0 < recipe.optimizer.lr <= MAX_LR and recipe.optimizer.weight_decay > 0
        (tmp_path / "recipe.toml").write_text(recipe.to_toml())
        assert read_recipe(tmp_path / "recipe.toml") == recipe


def test_rows_have_their_published_values() -> None:
    recipe = recipe_for(1_281_167, {**HERE, "train.batch_size": 1024})
    augment, train = recipe.augment, recipe.train
    assert (augment.policy, augment.repeats, augment.random_erasing) == ("rand-m9-mstd0.5-inc1", 3, 0.25)
    assert (augment.mixup, augment.cutmix, train.label_smoothing, train.epochs) == (0.8, 1.0, 0.1, 300)
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (1e-3, 0.05)
    assert recipe.lr_schedule.warmup == Interval(5, "epochs")
    assert (recipe.config(10).drop_path, train.clip_grad_norm, train.ema_decay) == (0.1, 1.0, None)
    large = recipe_for(1_281_167, {**HERE, "model.name": "vit_large_patch16_224"})
    assert large.config(10).drop_path == 0.2
    assert recipe_for(10**9, {**HERE, "train.batch_size": 4096}).optimizer.lr == 8e-4
    assert (
        recipe_for(10**9, {**HERE, "train.batch_size": 4096, "model.name": "vit_huge_patch14_224"}).optimizer.lr == 4e-4
    )


def test_learning_rate_scales_with_the_batch() -> None:
    for batch, options, lr in (
        (1024, {}, 1e-3),
        (256, {}, 5e-4),
        (64, {}, 2.5e-4),
        (16_384, {}, MAX_LR),
        (512, {"optimizer.name": "lamb"}, 1.5e-3),
        (256, {"optimizer.name": "lion"}, 1e-4),  # keeps its fixed default
        (256, {"optimizer.lr": 0.7}, 0.7),
    ):
        recipe = recipe_for(1_000_000, {**HERE, "train.batch_size": batch, **options})
        assert recipe.optimizer.lr == pytest.approx(lr, rel=1e-3), (batch, options)


def test_warmup_is_a_fraction_of_the_run() -> None:
    assert str(recipe_for(50_000, HERE).lr_schedule.warmup) == "10 epochs"
    assert recipe_for(50_000, {**HERE, "train.epochs": 20}).lr_schedule.warmup == Interval(2, "epochs")
    short = recipe_for(50_000, {**HERE, "train.steps": 100})
    assert short.lr_schedule.warmup == Interval(10)
    assert (short.train.steps, short.train.epochs) == (100, None)
    long = recipe_for(50_000, {**HERE, "train.steps": 100_000})
    assert long.lr_schedule.warmup == Interval(round(10 * 50_000 / 128))


def test_given_settings_override_the_defaults_one_by_one() -> None:
    given = ["augment.mixup=0.0", "data.crop_scale=[0.5, 1.0]", "train.clip_grad_norm=0"]
    recipe = recipe_for(50_000, {**HERE, "model.name": "vit_tiny_patch4_32"}, given)
    assert (recipe.augment.mixup, recipe.augment.cutmix, recipe.train.clip_grad_norm) == (0, 1, 0)
    assert (recipe.data.crop_scale, recipe.data.crop_pct) == ((0.5, 1.0), 1.0)
    padded = recipe_for(50_000, {**HERE, "model.name": "vit_tiny_patch4_32", "data.crop_padding": 4}).data
    assert padded.model_fields_set == {"path", "crop_padding", "crop_pct"}, "no range of areas with padding"


def test_stream_defaults_leave_out_unsupported_augmentation() -> None:
    recipe, packed = recipe_for(50_000, STREAM), recipe_for(50_000, HERE)
    assert with_defaults(packed, 1_000_000) == packed, "defaults are filled in once"
    assert (packed.augment.mixup, packed.augment.cutmix, packed.augment.repeats) == (1, 1, 3)
    assert (recipe.augment.mixup, recipe.augment.cutmix, recipe.augment.repeats) == (0, 0, 1)
    assert (recipe.augment.mixup_prob, recipe.augment.random_erasing) == (1, 0.25)
    with pytest.raises(RecipeError, match=r"augment.mixup is 0.5, which a stream does not support"):
        recipe_for(50_000, {**STREAM, "augment.mixup": 0.5})


def test_small_images_and_small_sets_get_a_small_model() -> None:
    chosen = {
        (1_437, 8): "vit_tiny_patch2_8",
        (100_000, 64): "vit_tiny_patch8_64",
        (5_000, 97): "vit_tiny_patch8_96",
        (1_281_167, 375): "vit_small_patch16_224",
        (50_000, None): "vit_tiny_patch16_224",
    }
    assert {case: default_model(*case) for case in chosen} == chosen
    assert default_model(3_000, 32, "mae") == "mae_vit_base_patch4_32"
    for case, name in chosen.items():
        assert recipe_for(case[0], HERE, side=case[1]).model.name == name
    for mesh, size in {"pp2xtp2xdp": "small", "tp3": "tiny", "tp4": "base", "tp8xdp2": "large", "auto": "tiny"}.items():
        assert recipe_for(3_000, {**HERE, "parallel.mesh": mesh}, side=32).model.name == f"vit_{size}_patch4_32"
    assert recipe_for(3_000, HERE, ["model.image_size=224"], side=32).model.name == "vit_tiny_patch16_224"
    with pytest.raises(ModelError, match="unknown model"):
        recipe_for(100, {**HERE, "model.name": "resnet"})


def test_tasks_of_text_have_the_settings_of_their_publications() -> None:
    bert = recipe_for(2_560, {**HERE, "task.name": "mlm", "train.batch_size": 256})
    assert (bert.model.name, bert.train.epochs, bert.optimizer.lr) == ("bert_base", 40, 1e-4)
    assert (bert.lr_schedule.shape, bert.learning_rate(2_560).warmup_steps, bert.augment.policy) == ("linear", 4, None)
    t5 = recipe_for(2_560, {**HERE, "task.name": "span"})
    assert (t5.model.name, t5.train.epochs, t5.optimizer.name, t5.optimizer.lr) == ("t5_small", 64, "adafactor", 1e-2)
    own = recipe_for(2_560, {**HERE, "task.name": "span", "optimizer.name": "sgd", "train.steps": 9})
    assert (own.optimizer.lr, own.train.steps, own.train.epochs) == (1e-3, 9, None)


def test_types_and_defaults_are_spelled_out() -> None:
    expected = {
        "model.pool": ('"cls", "avg" or "map"', "unset"),
        "optimizer.betas": ("2 numbers", "[0.9, 0.999]"),
        "augment.color_jitter": ("number or 3 numbers", "0.0"),
        "data.flip": ("number from 0 to 1", "0.5"),
    }
    assert {key: (one.kind, one.default) for key in expected for one in find(key)} == expected
    every = {one.key: one for one in settings()}
    assert len(every) == sum(len(field.annotation.model_fields) for field in Recipe.model_fields.values())  # type: ignore
    for one in every.values():
        assert one.effect.endswith(".") and one.kind and one.default, one.key
    assert [one.key for one in find("microbatches")] == ["parallel.microbatches"]
    assert {one.key.partition(".")[0] for one in find("train")} == {"train"}  # not stream.train
    with pytest.raises(
        RecipeError, match=r"^unknown setting 'train\.batchsize' \(did you mean 'train\.batch_size'\?\): "
    ):
        find("train.batchsize")


def test_settings_command_prints_one_section_or_all() -> None:
    some = CliRunner().invoke(app, ["settings", "lr_schedule"])
    assert some.exit_code == 0 and "lr_schedule.min_lr" in some.stdout and "[lr_schedule]" in some.stdout
    assert "train.batch_size" not in some.stdout
    every = json.loads(CliRunner().invoke(app, ["settings", "--json"]).stdout)
    assert [one["key"] for one in every] == [one.key for one in settings()]
