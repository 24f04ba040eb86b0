"""The input that a task reads."""

from vitpar.parallel import ParallelModel
from vitpar.recipe import Recipe
from vitpar.tasks.crop_input import CropInput
from vitpar.tasks.dino import DINO
from vitpar.tasks.image_input import ImageInput
from vitpar.tasks.input import Input
from vitpar.tasks.task import Task
from vitpar.tasks.text import TextTask
from vitpar.tasks.text_input import TextInput


def build_input(recipe: Recipe, model: ParallelModel, task: Task, teacher: ParallelModel | None = None) -> Input:
    """Return the input of this rank of `model`. Collective. Raises ModelError for a model that takes another input.

    teacher: takes images too; None for none.
    """
    if isinstance(task, DINO):
        return CropInput(recipe, model, task)
    if isinstance(task, TextTask):
        return TextInput(recipe, model, task)
    return ImageInput(recipe, model, task, teacher)
