"""Recipes: every setting of a training, its sources, and what is refused before anything starts."""

from vitpar.recipe.file import DEFAULT_RECIPE, read_recipe
from vitpar.recipe.recipe import Recipe

__all__ = ["DEFAULT_RECIPE", "Recipe", "read_recipe"]
