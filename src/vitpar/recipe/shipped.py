"""Shipped recipes: where they come from, what was published and what was run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitpar.errors import RecipeError
from vitpar.io import read_toml
from vitpar.recipe.file import ABOUT, SHIPPED, read_recipe
from vitpar.recipe.recipe import Recipe
from vitpar.text import nearest, shown


@dataclass(frozen=True)
class About:
    """Section [about] of a recipe file."""

    title: str
    """Model, data and length, in words."""
    source: str
    """Paper or code that the settings are from."""
    published: str
    """Result that the source reports; "none" if it reports none."""
    here: str
    """Parts that were run or tested with vitpar."""
    samples: int
    """Training samples of the data set."""


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe that can be named without folder and suffix."""

    name: str
    """Name, as in ``--recipe NAME``."""
    path: Path
    """The file."""
    about: About
    """Description."""

    def recipe(self) -> Recipe:
        """Return the recipe."""
        return read_recipe(self.path)


def shipped_recipes() -> list[ShippedRecipe]:
    """Return all shipped recipes, by name."""
    return [ShippedRecipe(path.stem, path, About(**read_toml(path)[ABOUT])) for path in sorted(SHIPPED.glob("*.toml"))]


def shipped_recipe(name: str) -> ShippedRecipe:
    """Return a shipped recipe. Raises RecipeError for an unknown name."""
    known = {one.name: one for one in shipped_recipes()}
    if name not in known:
        raise RecipeError(f"no shipped recipe '{shown(name)}'{nearest(name, known)}: `vitpar recipes` lists them")
    return known[name]
