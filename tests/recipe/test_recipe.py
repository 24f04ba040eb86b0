"""Recipes: precedence of sources, settings that replace each other, choice of a plan, mistakes and hostile files."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.command_line import refusal
from helpers.paths import ROOT
from helpers.trained import recipe_text
from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import ModelError, RecipeError, StrategyError, UserError
from vitpar.limits import MAX_QUOTED_CHARS, MAX_TOML_BYTES
from vitpar.recipe import DEFAULT_RECIPE, Recipe, read_recipe
from vitpar.recipe.recipe import Chosen
from vitpar.strategy import parse
from vitpar.strategy.plan_json import write_plan
from vitpar.tasks.data import transforms

EXPERIMENTS = sorted((ROOT / "experiments").glob("*.toml"))
SMALL = recipe_text(
    **{"model.num_heads": 2, "data.path": "somewhere", "train.batch_size": 32, "train.epochs": 2, "train.seed": 5}
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a small recipe and return its path."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_later_sources_override_earlier_ones(file: Path) -> None:
    assert read_recipe(file).train.seed == 5
    assert read_recipe(file, {"train.seed": 6}).train.seed == 6
    assert read_recipe(file, {"train.seed": 6}, ["train.seed=7"]).train.seed == 7
    assert read_recipe(file, {}, ["train.seed=7", "train.seed=8"]).train.seed == 8
    kept = read_recipe(file, {"train.seed": None, "train.batch_size": 16})
    assert (kept.train.seed, kept.train.batch_size) == (5, 16)  # an option not given changes nothing
    assert (kept.optimizer.name, kept.train.precision, kept.parallel.mesh) == ("adamw", "auto", "dp1")  # defaults


def test_recipes_may_have_a_mark_other_line_ends_and_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = tmp_path / "recipe.toml", SMALL.replace("somewhere", "~/somewhere")
    monkeypatch.setenv("HOME", "/home/me")
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_bytes(text.replace("\n", "\r\n").encode(encoding))
        assert read_recipe(path).data.path == "/home/me/somewhere"
    stream = {"stream.train": ["~/a.tar", "b.tar"], "stream.val": "c.tar", "stream.samples": 9}
    stream |= {"stream.val_samples": 9, "stream.classes": 2, "train.epochs": 1}
    assert read_recipe(None, stream).stream.train == ("/home/me/a.tar", "b.tar")
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(RecipeError, match="line 1 is not UTF-8"):
        read_recipe(path)


def test_assignments_parse_as_toml_or_text(file: Path) -> None:
    for assignment, value in (
        ("train.seed=3", 3),
        ("optimizer.lr = 3e-4", 3e-4),
        ("optimizer.name=sgd", "sgd"),
        ('optimizer.name="sgd"', "sgd"),
        ("optimizer.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("train.compile=true", True),
        ("parallel.split=[1, 3]", (1, 3)),
        ("parallel.mesh=pp2xtp2", "pp2xtp2"),
        ("data.path=a=b", "a=b"),
    ):
        section, _, name = assignment.partition("=")[0].strip().partition(".")
        assert getattr(getattr(read_recipe(file, {}, [assignment]), section), name) == value, assignment


ALTERNATIVES = [("train", {"epochs": 2}, {"steps": 9}), ("parallel", {"microbatches": 2}, {"microbatch_size": 9})]


@pytest.mark.parametrize(("section", "one", "other"), ALTERNATIVES)
def test_later_alternative_replaces_the_earlier_one_but_both_at_once_are_refused(
    section: str, one: dict[str, int], other: dict[str, int], tmp_path: Path
) -> None:
    base = {"data.path": "x"} | ({} if section == "train" else {"train.steps": 1})
    for first, second in ((one, other), (other, one)):
        ((old, before),), ((new, after),) = first.items(), second.items()
        recipe = read_recipe(None, {**base, f"{section}.{old}": before}, [f"{section}.{new}={after}"])
        settings = getattr(recipe, section)
        assert (getattr(settings, old), getattr(settings, new)) == (None, after)
    given = {f"{section}.{name}": value for name, value in {**one, **other}.items()}
    assignments = [f"{key}={value}" for key, value in given.items()]
    text = f'data.path = "x"\n{chr(10).join(assignments)}'
    for sources in ((written(tmp_path, text),), (None, {**base, **given}), (None, base, assignments)):
        with pytest.raises(RecipeError, match=f"both {' and '.join(given)} are given: keep one"):
            read_recipe(*sources)  # type: ignore[arg-type]


def test_crop_padding_and_random_resized_crops_exclude_each_other(tmp_path: Path) -> None:
    name = "crop_scale"
    base, pair = {"data.path": "x", "train.steps": 1}, [0.5, 1.0]
    padded = read_recipe(None, {**base, f"data.{name}": pair}, ["data.crop_padding=4"])
    resized = read_recipe(None, {**base, "data.crop_padding": 4}, [f"data.{name}={pair}"])
    assert (padded.data.crop_padding, resized.data.crop_padding) == (4, None)
    assert getattr(padded.data, name) != getattr(resized.data, name) == tuple(pair)
    assert "crop_scale" not in padded.to_toml() and read_recipe(written(tmp_path, padded.to_toml())) == padded
    with pytest.raises(RecipeError, match=f"both data.crop_padding and data.{name} are given: keep one"):
        read_recipe(None, {**base, "data.crop_padding": 4, f"data.{name}": pair})


def test_later_model_name_replaces_the_sizes_in_the_file(file: Path, tmp_path: Path) -> None:
    recipe = read_recipe(file, {"model.name": "vit_tiny_patch4_32"}, ["model.drop_path=0.2"])
    config = recipe.config(10)
    assert (config.embed_dim, config.depth, config.image_size, config.drop_path) == (192, 12, 32, 0.2)
    assert read_recipe(file, {}, ["model.name=vit_tiny_patch4_32"]).config(10) == config.__class__(
        **{**config.__dict__, "drop_path": 0.0}
    )
    assert read_recipe(file, {}, ["model.depth=6"]).config(10).depth == 6  # sizes alone change the file's model
    # A later name keeps settings that it does not define.
    text = '[model]\nname = "vit_tiny_patch4_32"\nembed_dim = 96\npool = "avg"\ndrop_path = 0.1\n[data]\npath = "x"\n'
    file = written(tmp_path, text + "[train]\nsteps = 1\n")
    config = read_recipe(file, {"model.name": "vit_base_patch16_224"}).config(10)
    assert (config.embed_dim, config.pool, config.drop_path) == (768, "avg", 0.1)
    other = read_recipe(file, {"model.name": "swin_tiny_patch4_window7_224"})  # which has no such pooling
    assert (other.model.pool, other.config(10).drop_path) == (None, 0.1)
    with pytest.raises(ModelError, match="unknown model option 'pool' of swin_tiny"):
        read_recipe(file, {"model.name": "swin_tiny_patch4_window7_224"}, ["model.pool=avg"]).config(10)
    text = read_recipe(
        None, {"data.path": "x", "model.name": "bert_base", "train.steps": 1}, ["model.options.tokens=64"]
    )
    text_config = text.config(10, {"tokens": 32, "vocab_size": 99})  # what the data imply, unless the recipe sets it
    assert (text_config.tokens, text_config.num_classes) == (64, 99)
    same = read_recipe(file, {"model.name": "vit_tiny_patch4_32"}).config(10)
    assert same == read_recipe(file).config(10) and same.embed_dim == 96


def test_settings_next_to_a_plan_file_are_refused_even_at_defaults(tmp_path: Path) -> None:
    base = {"data.path": "x", "train.steps": 1, "parallel.mesh": "plan.json"}
    recipe = read_recipe(None, base)
    again = read_recipe(written(tmp_path, recipe.to_toml()))
    assert again == recipe and again.parallel.model_fields_set == {"mesh"}
    with pytest.raises(RecipeError, match=r"'plan\.json' is a complete plan"):
        read_recipe(None, {**base, "parallel.schedule": "1f1b"}).requested_plans()


REFUSED = [
    (["train.sed=1"], r"unknown recipe key 'train.sed' \(did you mean 'train.seed'\?\)"),
    (["lr_schedule.min_lr=5.0"], r"lr_schedule.min_lr 5.0 is above optimizer.lr"),
    (["train.lr=1"], r"unknown recipe key 'train.lr' \(did you mean 'optimizer.lr'\?\)"),
    (["model.num_classes=3"], "unknown recipe key 'model.num_classes': the number of classes comes from the data"),
    (["mlp_ratio=4"], r"'mlp_ratio' is not a setting \(did you mean 'model.mlp_hidden_dim'\?\)"),
    (["trian.seed=1"], r"unknown recipe key 'trian' \(did you mean 'train'\?\)"),
    (["banana.split=1"], r"unknown recipe key 'banana'.*sections are task, model, data, augment"),
    (["train.precision=fp4"], "is 'fp4': input should be 'auto', 'fp64', 'fp32', 'bf16', 'fp16' or 'fp8'"),
    (["train.seed"], "'train.seed' is not an assignment: write --set section.key=value"),
    (["foo=3"], "'foo' is not a setting: use section.key, as in train.seed"),
]


def test_invalid_settings_are_refused_in_one_line(file: Path, tmp_path: Path) -> None:
    for assignments, message in REFUSED:
        with pytest.raises(RecipeError, match=message) as caught:
            read_recipe(file, {}, assignments)
        assert "\n" not in str(caught.value)
    for options in ({}, {"train.seed": 1}):
        with pytest.raises(RecipeError, match=r"recipe key 'train' is 3: write a table"):
            read_recipe(written(tmp_path, 'train = 3\n[data]\npath = "x"'), options)
    with pytest.raises(RecipeError, match=r"has neither train\.epochs nor train\.steps: give --epochs N or --steps N"):
        read_recipe(None, {"data.path": "x"})
    with pytest.raises(RecipeError, match=r"lacks 'data\.path': name a folder made by .* with --data DIR"):
        read_recipe(None, {"train.steps": 1})


def test_shipped_recipe_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # a folder of the same name, for example of images, must not hide the recipe
    assert read_recipe(Path("digits")) == read_recipe(ROOT / "experiments" / "digits.toml")
    with pytest.raises(RecipeError, match=r"no recipe 'digit' .did you mean 'digits'\?.: name a TOML file"):
        read_recipe(Path("digit"))
    with pytest.raises(RecipeError, match=r"is not valid TOML: .*line 1"):
        read_recipe(written(tmp_path, "[train\nseed = 1"))


def test_epochs_and_warmup_convert_to_steps() -> None:
    base = {"data.path": "x", "train.batch_size": 64}
    by_epochs = read_recipe(None, {**base, "train.epochs": 2.5, "lr_schedule.warmup": "0.5 epochs"})
    assert by_epochs.total_steps(1000) == 40  # 39.06 steps, rounded up to cover the epochs
    assert by_epochs.learning_rate(1000).warmup_steps == 8
    assert read_recipe(None, {**base, "train.steps": 7, "lr_schedule.warmup": 3}).learning_rate(1000).warmup_steps == 3
    assert read_recipe(None, {**base, "train.steps": 7}).learning_rate(1000).warmup_steps == 0


def test_learning_rate_is_scaled_from_a_reference_batch() -> None:
    base = {"data.path": "x", "train.steps": 7, "optimizer.lr": 1e-3}
    for batch, scaling, lr in ((1024, "linear", 4e-3), (1024, "sqrt", 2e-3), (64, "linear", 2.5e-4)):
        words = {"train.batch_size": batch, "optimizer.lr_batch_size": 256, "optimizer.lr_scaling": scaling}
        recipe = read_recipe(None, base | words)
        assert recipe.lr == recipe.learning_rate(1000)(1) == pytest.approx(lr)
    assert read_recipe(None, {**base, "train.batch_size": 1024}).lr == 1e-3


@pytest.mark.parametrize("path", [DEFAULT_RECIPE, *EXPERIMENTS], ids=lambda path: path.name)
def test_shipped_recipes_are_valid_and_read_back(path: Path, tmp_path: Path) -> None:
    recipe = read_recipe(path)
    config = recipe.config(4096)
    assert recipe.plan(config).world_size >= 1
    assert 0 <= recipe.learning_rate(1_281_167).warmup_steps < recipe.total_steps(1_281_167)
    # A smaller crop_pct would enlarge small images and crop their edges.
    assert recipe.data.crop_pct == 1.0 or path.name not in ("digits.toml", "cifar10.toml", DEFAULT_RECIPE.name)
    sections = {"optimizer.betas": (0.5, 0.75), "train.ema_decay": 0.5}  # TOML has no null, so 0 means no clipping
    for changed in ({}, {**sections, "train.clip_grad_norm": 0}):
        recipe = read_recipe(path, changed)
        assert read_recipe(written(tmp_path, recipe.to_toml())) == recipe


MODEL = {"name": "vit_custom", "image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 4}


def recipe(mesh: str, fallbacks: list[str], **parallel: Any) -> Recipe:
    """Return a recipe with batches of 8 images for a model of 4 blocks and 4 heads."""
    options = {f"model.{key}": value for key, value in MODEL.items()} | {"data.path": "x", "train.steps": 1}
    options |= {"train.batch_size": 8, "parallel.mesh": mesh, "parallel.fallback_meshes": fallbacks}
    return read_recipe(None, options | {f"parallel.{key}": value for key, value in parallel.items()})


def chosen(made: Recipe, ranks: int) -> Chosen:
    return made.chosen(made.config(10), lambda plan: plan.resolve(ranks))


def test_first_fitting_plan_is_used_with_a_reason() -> None:
    found = chosen(recipe("pp2xdp", ["fsdp"]), 4)
    assert (str(found.plan), found.because) == ("pp2xdp2", None)
    for mesh, fallbacks, ranks, plan, because in (
        ("pp2xdp", ["fsdp"], 1, "dp1", "the degrees given in 'pp2xdp' multiply to 2, which does not divide 1 rank"),
        ("dp", ["tp2xdp"], 16, "tp2xdp8", "a batch of 8 samples does not divide into the 16"),
        ("dp4", ["dp2", "dp1"], 1, "dp1", "'dp2' needs 2 ranks but the world has 1"),
    ):
        found = chosen(recipe(mesh, fallbacks), ranks)
        assert str(found.plan) == plan and found.because is not None
        assert found.because.startswith(f"the plan is '{plan}', since ") and because in found.because
    with pytest.raises(StrategyError) as refused:
        chosen(recipe("dp", ["tp3xdp", "pp2xdp"]), 6)
    start = "neither parallel.mesh nor any of parallel.fallback_meshes fits: dp: a batch of 8"
    assert str(refused.value).startswith(start)
    assert "; tp3xdp: tp3 does not divide the 4 heads" in str(refused.value)
    assert "; pp2xdp: a batch of 8" in str(refused.value)
    with pytest.raises(StrategyError, match=r"^a batch of 8 samples does not divide"):  # a single plan's own error
        chosen(recipe("dp", []), 6)


def test_pipeline_settings_apply_only_to_pipeline_plans() -> None:
    made = recipe("pp4xdp", ["pp2xdp", "dp"], schedule="interleaved1f1b", virtual_stages=2, microbatches=4)
    pipeline, alone = chosen(made, 2).plan, chosen(made, 1).plan
    assert (str(pipeline), pipeline.schedule, pipeline.virtual_stages) == ("pp2", "interleaved1f1b", 2)
    assert (str(alone), alone.schedule, alone.virtual_stages) == ("dp1", "1f1b", 1)
    assert pipeline.microbatches == alone.microbatches == 4
    found = chosen(recipe("dp", ["tp2xdp"], microbatches=4), 4)  # 2 images a rank do not divide into 4 micro-batches
    assert str(found.plan) == "tp2xdp2" and found.because is not None and "micro-batches" in found.because


def test_plan_file_can_have_fallbacks(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", parse("tp2xdp2"))
    made = recipe(str(tmp_path / "plan.json"), ["dp"])
    (tmp_path / "recipe.toml").write_text(made.to_toml())
    again = read_recipe(tmp_path / "recipe.toml")
    assert [str(chosen(again, ranks).plan) for ranks in (4, 2)] == ["tp2xdp2", "dp2"]
    with pytest.raises(RecipeError, match="is a complete plan: leave out the other settings"):
        recipe(str(tmp_path / "plan.json"), ["dp"], microbatches=2).requested_plans()


def test_invalid_fallback_is_refused_even_if_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typo must show when the run starts, not after a lost host when the fallback is needed."""
    words = ["plan", "dp2", "--world-size", "2", "--batch-size", "8", "--set"]
    assert "unknown role 'zp'" in refusal([*words, 'parallel.fallback_meshes=["zp"]'], monkeypatch, capsys)
    assert "fallback_meshes' is 'dp1'" in refusal([*words, "parallel.fallback_meshes=dp1"], monkeypatch, capsys)


def read_hostile(path: Path | None, *assignments: str) -> Recipe:
    return read_recipe(path, {"data.path": "here", "train.steps": 1}, assignments)


def refuse(path: Path | None, message: str, *assignments: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_hostile(path, *assignments)
    said = str(caught.value)
    assert len(said) < 2 * MAX_QUOTED_CHARS + 400 and "\n" not in said


@pytest.mark.timeout(60)
def test_oversized_deeply_nested_and_special_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    for text, message in (
        ("a = " + "[" * 200_000, "not valid TOML: it is nested too deeply"),
        (f"[train]\nsteps = {'9' * 5_000}", "not valid TOML: Exceeds the limit"),
        ("#" * (MAX_TOML_BYTES + 1), "it has more than 262,144 bytes"),
    ):
        path.write_text(text)
        refuse(path, message)
    path.unlink()
    refuse(Path("/dev/zero"), "cannot be read: it is not a regular file")
    refuse(tmp_path, "cannot be read: it is a folder")
    refuse(tmp_path / ("x" * 5_000), "cannot be read: File name too long")
    os.mkfifo(path)
    refuse(path, "cannot be read: it is not a regular file")


@pytest.mark.parametrize("assignment", ['augment.policy="\ud800"', "data.path=b\udcff", 'stream.train=["a\udcff.tar"]'])
def test_non_utf8_assignments_are_refused(assignment: str) -> None:
    with pytest.raises(RecipeError, match=r"which is not UTF-8: write it in UTF-8") as refused:
        read_recipe(None, {"train.steps": 1}, [assignment])
    assert str(refused.value).encode()


def test_resize_is_limited_for_tiny_crop_pct_and_long_images() -> None:
    with pytest.raises(RecipeError, match="crop_pct 1e-05 resizes images of 224 pixels to more than 16,384"):
        transforms(read_hostile(None, "data.crop_pct=0.00001"), 224)
    stripe = np.zeros((1, 65_535, 3), np.uint8)
    assert EvalTransform(224)(stripe).shape == (3, 224, 224)
    assert EvalTransform(224)(np.zeros((100, 4_000, 3), np.uint8)).shape == (3, 224, 224)
