"""The setting train.freeze: values, refusals, and what commands make of it."""

import pytest

from vitpar.errors import RecipeError
from vitpar.training.recipe import Recipe, read_recipe


def recipe_of(*assignments: str) -> Recipe:
    return read_recipe(None, {"data.path": "x", "train.steps": 1, "model.name": "vit_nano_patch4_32"}, assignments)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("embed, 0-1", {"embed", "blocks.0", "blocks.1"}),
        ('"embed"', {"embed"}),
        ("3", {"blocks.3"}),  # TOML reads a number
    ],
)
def test_setting_names_layers(text: str, names: set[str]) -> None:
    recipe = recipe_of(f"train.freeze={text}")
    assert recipe.frozen(recipe.config(10)) == names
    assert read_recipe(None, {"data.path": "x", "train.steps": 1}).frozen(recipe.config(10)) == frozenset()


def test_invalid_selectors_are_refused_when_the_recipe_is_read() -> None:
    with pytest.raises(RecipeError, match=r"^train\.freeze: 'blocks\[0\]' is not a layer selector"):
        recipe_of("train.freeze=blocks[0]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-9", "train.freeze: '0-9' names block 9, but vit_nano_patch4_32 has 8 blocks, 0 to 7: change it"),
        ("embed, *, head", "train.freeze 'embed, *, head' freezes all layers: leave out one, such as head"),
    ],
)
def test_layers_that_cannot_be_frozen_are_refused_for_the_model(text: str, message: str) -> None:
    recipe = recipe_of(f"train.freeze={text}")
    with pytest.raises(RecipeError) as refused:
        recipe.frozen(recipe.config(10))
    assert str(refused.value) == message
