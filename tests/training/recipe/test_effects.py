"""Table of settings without effect: its keys exist in recipes, and default values are never refused."""

from pathlib import Path

import pytest

from vitpar.errors import RecipeError
from vitpar.models.description import layer_of
from vitpar.strategy.support import COMMUNICATION
from vitpar.training.recipe import Recipe, read_recipe
from vitpar.training.recipe.effects import COMMANDS, EFFECTS

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
