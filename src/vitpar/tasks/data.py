"""Data sets of a recipe's task, and the model that follows from them, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitpar.data.shards.manifest import has_manifest, read_manifest
from vitpar.errors import RecipeError
from vitpar.recipe import Recipe
from vitpar.recipe.request import classes_of
from vitpar.tasks import image_data
from vitpar.tasks.image_data import ImageSet
from vitpar.tasks.known import task_class, task_of

if TYPE_CHECKING:
    from vitpar.data.text.text_set import TextSet
    from vitpar.models.config import ModelConfig


def open_split(recipe: Recipe, split: str) -> ImageSet | TextSet:
    """Return one split of a recipe's data; a stream has `train` and `val`.

    Raises DataError, and RecipeError for a stream of text.
    """
    if task_class(recipe).INPUT == "images":
        return image_data.open_split(recipe, split)
    from vitpar.data.text.text_set import TextSet

    if recipe.data.path is None:
        raise RecipeError(f"task '{recipe.task.name}' reads packed text, not a stream: name a folder with --data")
    return TextSet.open(recipe.data.path, split)


def open_data(
    recipe: Recipe, train: ImageSet | TextSet | None = None
) -> tuple[ImageSet | TextSet, ImageSet | TextSet | None]:
    """Return the training and validation sets of a recipe.

    The latter is None for a data set without a `val` split.

    train: training set if it is open already.

    Raises DataError and RecipeError.
    """
    path = recipe.data.path
    has_val = path is None or "val" in read_manifest(path).splits
    return train or open_split(recipe, "train"), open_split(recipe, "val") if has_val else None


def model_of(recipe: Recipe, num_classes: int | None, default: int) -> ModelConfig:
    """Return the model of a recipe for plans and prices, with the classes, or the sizes of text, of its data if found.

    num_classes: classes, or tokens of the vocabulary, in place of the data's.
    default: classes without data; a model of text then has its own sizes.
    """
    path = recipe.data.path
    there = path is not None and has_manifest(path)
    usual: dict[str, Any] = {} if num_classes is None else {"vocab_size": num_classes}
    if there and task_class(recipe).INPUT == "text":
        usual = {**task_of(recipe, open_split(recipe, "train")).model_options, **usual}
    outputs = classes_of(recipe, num_classes, default)
    if not (task := task_class(recipe)).OUTPUTS_ARE_LABELS and task.INPUT == "images":
        outputs = task_of(recipe, outputs).outputs
    return recipe.config(outputs, usual)
