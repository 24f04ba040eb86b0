"""Settings without effect: their table, those of optimizers, and the precision auto."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vitpar.errors import RecipeError
from vitpar.models.description import layer_of
from vitpar.strategy.support import COMMUNICATION
from vitpar.training.optim.state_memory import state_bytes, state_words
from vitpar.training.recipe import Recipe, read_recipe
from vitpar.training.recipe.effects import COMMANDS, EFFECTS
from vitpar.training.recipe.machine import automatic_precision, replace_auto_precision

KEYS = {
    f"{section}.{name}" for section, settings in Recipe.model_validate({"data": {"path": "x"}}) for name, _ in settings
}


def test_tables_name_only_existing_settings() -> None:
    for effect in (*EFFECTS, *COMMUNICATION):
        assert set(effect.keys) <= KEYS
    every = {f"{key.partition('.')[0]}.…" for key in KEYS}
    for doing, used in COMMANDS.items():
        assert set(used) <= KEYS | every, doing
        assert len(set(used)) == len(used), doing


def test_default_value_without_effect_is_accepted() -> None:
    for key in (key for effect in EFFECTS for key in effect.keys if not key.startswith("optimizer.")):
        section, _, name = key.partition(".")
        default = type(getattr(read_recipe(None, BASE), section)).model_fields[name].default
        assert read_recipe(None, {**BASE, key: default}) == read_recipe(None, BASE), key


BASE = {"data.path": "x", "train.steps": 1}


WITHOUT = [
    (["faults.max_skipped=3"], r"^faults\.max_skipped is 3, but faults\.non_finite 'stop' skips nothing"),
    (["faults.non_finite=skip", "train.precision=fp16"], "which train.precision fp16 always does"),
    (["faults.debug_checks=true", "train.compile=true"], "faults.debug_checks cannot check compiled blocks"),
    (["track.trackers=['mlflow']"], r"track\.trackers\.0"),
    (["track.trackers=['wandb', 'wandb']"], "names 'wandb' twice"),
    (["track.trackers=['tensorboard']", "track.project=x"], "only wandb and trackio use"),
    (["track.trackers=['trackio']", "track.wandb_mode=online"], "does nothing without W&B"),
    (["track.trackers=['wandb']", "track.name=''"], r"track\.name"),
    (
        ["data.cache=device", "data.bad_sample=skip"],
        r"^data\.bad_sample is 'skip', but data\.cache 'device' decodes all",
    ),
    (["data.cache=device", "data.cache_gb=2"], r"cache_gb is 2.0, which does nothing with data\.cache 'device'"),
    (["data.decode=device", "data.cache=memory"], r"^data\.decode is 'device', which needs data\.cache none"),
    (["data.decode=device", "data.crop_padding=4"], r"^data\.decode is 'device'"),
    (["train.ema_warmup=true"], r"ema_warmup is true, which does nothing without train\.ema_decay"),
    (["train.freeze=blocks[0]"], r"^train\.freeze: 'blocks\[0\]' is not a layer selector"),
]


def test_settings_without_effect_are_refused(tmp_path: Path) -> None:
    for assignments, message in WITHOUT:
        with pytest.raises(RecipeError, match=message):
            read_recipe(None, BASE, assignments)
    used = ["faults.max_skipped=3", "faults.non_finite=skip", "track.trackers=['wandb', 'trackio']"]
    recipe = read_recipe(None, BASE, used)
    assert recipe.faults.max_skipped == 3
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    assert read_recipe(tmp_path / "recipe.toml") == recipe


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
            "*.norm7.*",
            "train.freeze: '*.norm7.*' matches no parameter of vit_nano_patch4_32: use a pattern such as "
            "*.bias or blocks.0.*",
        ),
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


def test_defaults_depend_on_the_optimizer(tmp_path: Path) -> None:
    names = "muon", "lars", "lamb", "sgd", "lion", "adam", "adafactor"
    muon, lars, lamb, sgd, lion, adam, adafactor = (read(f"optimizer.name={name}").optimizer for name in names)
    assert (muon.momentum, muon.nesterov, muon.ns_steps, muon.adjust_lr_fn) == (0.95, True, 5, "match_rms_adamw")
    assert (lars.momentum, lars.nesterov, lars.trust_coefficient) == (0.9, False, 0.001)
    assert (lamb.betas, lamb.eps) == ((0.9, 0.999), 1e-6)
    assert (sgd.momentum, sgd.nesterov) == (0.0, False)
    assert (lion.lr, lion.betas, lion.weight_decay) == (1e-4, (0.9, 0.99), 0.05)
    assert (adam.lr, adam.betas, adam.weight_decay) == (1e-3, (0.9, 0.999), 0.0)
    assert (adafactor.lr, adafactor.weight_decay) == (1e-2, 0.0)
    given = read("optimizer.name=muon", "optimizer.momentum=0.5", "optimizer.nesterov=false").optimizer
    assert (given.momentum, given.nesterov) == (0.5, False)
    file = tmp_path / "recipe.toml"
    for name in (*names, "adamw"):
        more = () if name in ("sgd", "adam", "adamw") else ("optimizer.implementation=foreach",)
        file.write_text((recipe := read(f"optimizer.name={name}", *more)).to_toml())
        assert read_recipe(file) == recipe
        assert ("momentum" in file.read_text()) == (name in ("sgd", "lars", "muon"))
    assert read_recipe(file, {}, ["optimizer.name=muon"]).optimizer.momentum == 0.95


def test_state_bytes_and_description_per_optimizer() -> None:
    for name, momentum, numbers, state in (
        ("adamw", None, 4, ", adamw state"),
        ("adam", None, 4, ", adam state"),
        ("lion", None, 3, ", lion state"),
        ("lamb", None, 4, ", lamb state"),
        ("lars", None, 3, ", lars state"),
        ("lars", 0.0, 2, ""),
        ("muon", None, 4, ", muon state (at most)"),
    ):
        recipe = read("train.precision=fp32", f"optimizer.name={name}", *([] if momentum is None else [LITTLE]))
        assert state_bytes(recipe, recipe.config(10)) == 4 * numbers, name
        assert state_words(recipe) == f"parameters, gradients{state} in float32"
    assert ", adafactor state (about) in" in state_words(read("optimizer.name=adafactor", "train.precision=fp32"))


LITTLE = "optimizer.momentum=0.0"
REFUSED = [
    (["name=lamb", "momentum=0.9"], r"optimizer\.momentum is 0\.9, which lamb does not use: leave it out"),
    (["name=muon", "trust_coefficient=1.0"], r"optimizer\.trust_coefficient is 1\.0, which muon does not use"),
    (["name=adamw", "nesterov=true"], r"optimizer\.nesterov is True, which adamw does not use"),
    (["name=sgd", "nesterov=true"], r"momentum is 0: set optimizer\.momentum, or nesterov to false"),
    (["name=lamb", "implementation=fused"], r"'fused', which lamb does not support: use 'foreach' or 'auto'"),
    (["name=sgd", "implementation=triton"], r"'triton', which sgd does not support: use 'fused' or 'auto'"),
    (["name=muon", "ns_steps=0"], r"recipe key 'optimizer\.ns_steps' is 0"),
    (["name=adafactor", "betas=[0.8,0.9]"], r"optimizer\.betas is \(0\.8, 0\.9\), which adafactor does not use"),
    (["name=rprop"], r"recipe key 'optimizer\.name' is 'rprop'"),
]


def test_optimizer_settings_without_effect_are_refused() -> None:
    for assignments, sentence in REFUSED:
        with pytest.raises(RecipeError, match=sentence) as caught:
            read(*(f"optimizer.{assignment}" for assignment in assignments))
        assert "\n" not in str(caught.value)


def recipe(**train: Any) -> Recipe:
    return Recipe.model_validate({"data": {"path": "x"}, "train": {"steps": 1, **train}})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list of compute capabilities that stands for this machine's devices; the test fills it."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found[index])
    return found


@pytest.mark.parametrize(
    ("capabilities", "name"),
    [([(8, 0)], "bf16"), ([(9, 0)] * 8, "bf16"), ([(12, 0)], "bf16"), ([(7, 5)], "fp32"), ([(8, 0), (7, 0)], "fp32")],
)
def test_auto_precision_is_bf16_only_on_gpus_that_compute_in_it(
    gpus: list[tuple[int, int]], capabilities: list[tuple[int, int]], name: str
) -> None:
    gpus += capabilities
    found = replace_auto_precision(recipe(), "cuda")
    assert (found.train.precision, found.train.steps) == (name, 1)
    assert replace_auto_precision(found, "cpu") is found
    assert replace_auto_precision(recipe(precision="fp16"), "cuda").train.precision == "fp16"
    assert replace_auto_precision(recipe(), "cpu").train.precision == "fp32"


def test_precisions_without_effect_are_refused_before_and_after_resolution(gpus: list[tuple[int, int]]) -> None:
    gpus.append((8, 0))
    reduced = recipe(reduce_dtype="bf16")
    assert replace_auto_precision(reduced, "cuda").train.reduce_dtype == "bf16"
    with pytest.raises(RecipeError, match=r"reduce_dtype is 'bf16', which does nothing with train.precision 'fp32'"):
        replace_auto_precision(reduced, "cpu")
    for words in ("train.reduce_dtype=fp16", "loss_scale.hysteresis=1"):
        with pytest.raises(RecipeError, match=r"with train.precision 'auto'|train.precision 'auto' does not support"):
            read_recipe(None, {"data.path": "x", "train.steps": 1}, [words])


def test_planning_uses_the_profiled_precision() -> None:
    rows = {(None, "cuda"): "fp32", ("bf16", "cuda"): "bf16", ("fp32", "cuda"): "fp32", ("bf16", "cpu"): "fp32"}
    assert {given: automatic_precision(*given) for given in rows} == rows
