"""Settings without effect: their table, those of optimizers, and the precision auto."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vitpar.errors import RecipeError
from vitpar.models.description import layer_of
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.effects import COMMANDS, NEEDS, without_idle
from vitpar.recipe.machine import replace_auto_precision
from vitpar.strategy import parse
from vitpar.training.optim.state_memory import state_bytes, state_words

KEYS = {
    f"{section}.{name}" for section, settings in Recipe.model_validate({"data": {"path": "x"}}) for name, _ in settings
}


def test_tables_name_only_existing_settings() -> None:
    for need in NEEDS:
        assert set(need.keys) <= KEYS
    every = {f"{key.partition('.')[0]}.…" for key in KEYS}
    for doing, used in COMMANDS.items():
        assert set(used) <= KEYS | every, doing
        assert len(set(used)) == len(used), doing


BASE = {"data.path": "x", "train.steps": 1}


REFUSED = [
    (["faults.debug_checks=true", "train.compile=true"], "faults.debug_checks cannot check compiled blocks"),
    (["track.trackers=['mlflow']"], r"track\.trackers\.0"),
    (["track.trackers=['wandb', 'wandb']"], "names 'wandb' twice"),
    (["track.trackers=['wandb']", "track.name=''"], r"track\.name"),
    (
        ["data.cache=device", "data.bad_sample=skip"],
        r"^data\.bad_sample is 'skip', but data\.cache 'device' decodes all",
    ),
    (["data.decode=device", "data.cache=memory"], r"^data\.decode is 'device', which needs data\.cache none"),
    (["data.decode=device", "data.crop_padding=4"], r"^data\.decode is 'device'"),
    (["train.freeze=blocks[0]"], r"^train\.freeze: 'blocks\[0\]' is not a layer selector"),
    (["task.name=mae", "distill.teacher=runs/x"], r"^distill\.teacher is 'runs/x', but task 'mae' has no classes"),
    (["optimizer.name=lamb", "optimizer.implementation=fused"], r"'fused', which lamb does not support: use auto"),
    (["optimizer.name=sgd", "optimizer.implementation=triton"], r"'triton', which sgd does not support: use auto"),
]


def test_contradictions_are_refused() -> None:
    for assignments, message in REFUSED:
        with pytest.raises(RecipeError, match=message) as caught:
            read_recipe(None, BASE, assignments)
        assert "\n" not in str(caught.value)


IDLE = [
    ("dp1", ["faults.max_skipped=3"], "faults.max_skipped 3 does nothing: it needs faults.non_finite skip"),
    ("dp1", ["optimizer.name=lamb", "optimizer.momentum=0.9"], "optimizer.momentum 0.9 does nothing: it needs optimi"),
    ("dp1", ["optimizer.name=sgd", "optimizer.nesterov=true"], "optimizer.nesterov True does nothing: it needs optimi"),
    ("dp1", ["track.trackers=['tensorboard']", "track.project=x"], "track.project x does nothing: it needs wandb or "),
    ("dp1", ["lr_schedule.min_lr=1e-5", "lr_schedule.shape=constant"], "lr_schedule.min_lr 1e-05 does nothing: it nee"),
    ("dp1", ["optimizer.lr_scaling=sqrt"], "optimizer.lr_scaling sqrt does nothing: it needs optimizer.lr_batch_size"),
    ("dp1", ["distill.alpha=0.3"], "distill.alpha 0.3 does nothing: it needs distill.teacher"),
    ("dp1", ["task.name=mlm", "augment.mixup=0.5"], "augment.mixup 0.5 does nothing: it needs a task of images"),
    ("dp1", ["train.ema_warmup=true"], "train.ema_warmup True does nothing: it needs train.ema_decay"),
    ("dp1", ["lr_schedule.warmup_lr=1e-5"], "lr_schedule.warmup_lr 1e-05 does nothing: it needs lr_schedule.warmup"),
    ("dp1", ["loss_scale.hysteresis=1"], "loss_scale.hysteresis 1 does nothing: it needs train.precision fp16"),
    ("fsdp2", ["communication.bucket_cap_mb=25"], "communication.bucket_cap_mb 25.0 does nothing: it needs layers"),
    ("dp2xtp2+zero1", ["communication.bucket_cap_mb=25"], "communication.bucket_cap_mb 25.0 does nothing"),
    ("dp2", ["communication.prefetch=1"], "communication.prefetch 1 does nothing: it needs layers with fsdp"),
    ("tp2", ["communication.reshard_after_forward=false"], "communication.reshard_after_forward False does nothing"),
    ("dp2+zero1", ["communication.reshard_after_forward=true"], "communication.reshard_after_forward True does no"),
    ("pp1: 0-1=dp2, *=fsdp2", ["communication.bucket_cap_mb=25", "communication.prefetch=1"], ""),
    ("tp4+2d", ["communication.prefetch=1", "communication.reshard_after_forward=false"], ""),
    ("dp1", ["faults.max_skipped=3", "faults.non_finite=skip", "track.trackers=['wandb']", "track.project=x"], ""),
]


def test_settings_without_effect_are_named_and_left_out(tmp_path: Path) -> None:
    for mesh, assignments, sentence in IDLE:
        given = read_recipe(None, {**BASE, "train.precision": "fp32"}, assignments)
        kept, warnings = without_idle(given, parse(mesh))
        assert len(warnings) == bool(sentence) and "".join(warnings).startswith(sentence), (mesh, warnings)
        assert not sentence or kept.flat() != given.flat()
        (tmp_path / "recipe.toml").write_text(given.to_toml())
        again = read_recipe(tmp_path / "recipe.toml")
        assert again.flat() == (kept if "communication" not in sentence else given).flat(), mesh


def test_freeze_names_layers_and_parameters_of_the_model() -> None:
    def frozen(text: str) -> frozenset[str]:
        recipe = read_recipe(None, {**BASE, "model.name": "vit_nano_patch4_32"}, [f"train.freeze={text}"])
        return recipe.frozen(recipe.config(10))

    assert {layer_of(name) for name in frozen("embed, 0-1")} == {"embed", "blocks.0", "blocks.1"}
    assert frozen('"embed"') == frozen("embed") and frozen("3") == frozen("blocks.3.*")  # TOML reads a number
    assert frozen("blocks.0.norm1.*, !*.bias") == {"blocks.0.norm1.weight"}
    kept = frozen("*, !1-7, !*.bias")
    assert {layer_of(name) for name in kept} == {"blocks.0"} and not any(name.endswith(".bias") for name in kept)
    plain = read_recipe(None, BASE)
    assert plain.frozen(plain.config(10)) == frozenset()
    for text, message in (
        ("0-9", "train.freeze: '0-9' names block 9, but vit_nano_patch4_32 has 8 blocks, 0 to 7: change it"),
        ("embed, *, head", "train.freeze 'embed, *, head' freezes all layers: leave out one, such as head"),
        (
            "0, !1.*",
            "train.freeze: '1.*' matches no parameter of vit_nano_patch4_32: use a pattern such as *.bias or "
            "blocks.0.*",
        ),
        ("!*.bias", "train.freeze: '!*.bias' excepts nothing that the list names: leave it out"),
    ):
        with pytest.raises(RecipeError) as refused:
            frozen(text)
        assert str(refused.value) == message


def read(*assignments: str) -> Recipe:
    return read_recipe(None, {"data.path": "x", "train.steps": 1}, assignments)


def test_state_bytes_and_description_per_optimizer() -> None:
    for name, momentum, numbers, state in (
        ("adamw", None, 4, ", adamw state"),
        ("lion", None, 3, ", lion state"),
        ("lars", 0.0, 2, ""),
        ("muon", None, 4, ", muon state (at most)"),
    ):
        recipe = read("train.precision=fp32", f"optimizer.name={name}", *([] if momentum is None else [LITTLE]))
        assert state_bytes(recipe, recipe.config(10)) == 4 * numbers, name
        assert state_words(recipe) == f"parameters, gradients{state} in float32"
    assert ", adafactor state (about) in" in state_words(read("optimizer.name=adafactor", "train.precision=fp32"))


LITTLE = "optimizer.momentum=0.0"


def recipe(**train: Any) -> Recipe:
    return Recipe.model_validate({"data": {"path": "x"}, "train": {"steps": 1, **train}})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list of compute capabilities that stands for this machine's devices; the test fills it."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found[index])
    return found


def test_auto_precision_is_bf16_only_on_gpus_that_compute_in_it(gpus: list[tuple[int, int]]) -> None:
    for capabilities, name in (([(9, 0)] * 8, "bf16"), ([(7, 5)], "fp32"), ([(8, 0), (7, 0)], "fp32")):
        gpus[:] = capabilities
        found = replace_auto_precision(recipe(), "cuda")
        assert found.train.precision == name and replace_auto_precision(found, "cpu") is found
    assert replace_auto_precision(recipe(precision="fp16"), "cuda").train.precision == "fp16"
    assert replace_auto_precision(recipe(), "cpu").train.precision == "fp32"


def test_type_of_sums_is_refused_before_and_after_precision_is_known(gpus: list[tuple[int, int]]) -> None:
    gpus.append((8, 0))
    reduced = recipe(reduce_dtype="bf16")
    assert replace_auto_precision(reduced, "cuda").train.reduce_dtype == "bf16"
    with pytest.raises(RecipeError, match=r"reduce_dtype is 'bf16', which train.precision 'fp32' does not support"):
        replace_auto_precision(reduced, "cpu")
    with pytest.raises(RecipeError, match=r"train.precision 'auto' does not support"):
        read_recipe(None, {"data.path": "x", "train.steps": 1}, ["train.reduce_dtype=fp16"])
