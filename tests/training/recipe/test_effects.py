"""Table of settings without effect: its keys exist in recipes, and default values are never refused."""

import pytest

from vitpar.errors import RecipeError
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


@pytest.mark.parametrize("key", [key for effect in EFFECTS for key in effect.keys if not key.startswith("optimizer.")])
def test_default_value_without_effect_is_accepted(key: str) -> None:
    section, _, name = key.partition(".")
    default = type(getattr(read_recipe(None, BASE), section)).model_fields[name].default
    assert read_recipe(None, {**BASE, key: default}) == read_recipe(None, BASE)


BASE = {"data.path": "x", "train.steps": 1}


def test_first_setting_without_effect_is_named() -> None:
    with pytest.raises(RecipeError, match=r"^faults\.max_skipped is 3, but faults\.non_finite 'stop' skips nothing"):
        read_recipe(None, BASE, ["faults.max_skipped=3"])
    assert read_recipe(None, BASE, ["faults.max_skipped=3", "faults.non_finite=skip"]).faults.max_skipped == 3
