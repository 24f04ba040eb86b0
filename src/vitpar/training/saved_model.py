"""Saved weights to compute with: where they are, their recipe, and the model on its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitpar.errors import DataError
from vitpar.launch.process_group import in_world
from vitpar.launch.resources import choose_device
from vitpar.launch.world import Device
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.file import read_section
from vitpar.recipe.machine import choose_plan, on_device
from vitpar.recipe.recipe import Chosen
from vitpar.recipe.request import RecipeRequest
from vitpar.recipe.sections.input import DataSection, ModelSection, TaskSection
from vitpar.recipe.sections.running import CommunicationSection, ParallelSection
from vitpar.recipe.sections.training import LoraSection
from vitpar.tasks import Task, task_of
from vitpar.terminal import complain
from vitpar.training.saving.resume import weights_folder

if TYPE_CHECKING:
    import torch

    from vitpar.data.stream.stream_set import ImageSet
    from vitpar.models import ModelConfig
    from vitpar.parallel import ParallelModel
    from vitpar.tasks.image_input import ImageInput

AT_ONCE = 64
"""Images that are computed at a time by default, where the recipe's batch size does not matter."""


@dataclass(frozen=True)
class SavedModel:
    """Saved weights, with the recipe to compute with them."""

    folder: Path
    """Folder of the weights or the checkpoint."""
    config: ModelConfig
    """Configuration of the model."""
    recipe: Recipe
    """Recipe of the training, without its settings for parallelism and speed."""

    def task(self, images: ImageSet | None = None) -> Task:
        """Return the task that the model was trained for, for the labels of `images` (None: of its training).

        Raises RecipeError for a task of the user whose file was not named.
        """
        return task_of(self.recipe, self.config.num_classes if images is None else images)

    def class_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes that the model predicts, from the weights or else the recipe's data.

        None for no names, or no classes. Raises DataError for names that do not fit, and a task without predictions.
        """
        from vitpar.checkpoint.index import read_class_names
        from vitpar.data.shards.manifest import MANIFEST, read_any_manifest
        from vitpar.weights.folder import RECIPE

        if not (task := self.task()).PREDICTS:
            raise DataError(
                f"`vitpar predict` has nothing to print for task '{task.NAME}': evaluate its models with `vitpar eval`"
            )
        if not task.OUTPUTS_ARE_LABELS:
            return None
        classes, data = self.config.num_classes, read_section(self.folder / RECIPE, "data", DataSection).path
        if (names := read_class_names(self.folder, classes)) is not None:
            return names
        if data is None or not (Path(data) / MANIFEST).is_file():
            return None
        manifest = read_any_manifest(Path(data))
        known = manifest.get("class_names") or manifest.get("classes") or []
        return tuple(known) if len(known) == classes else None

    def labelled(self, images: ImageSet) -> tuple[ImageSet, str | None]:
        """Return `images` with this model's classes, matched by name, and a warning or None. Raises DataError."""
        from vitpar.checkpoint.index import read_class_names
        from vitpar.data.classes import match_classes
        from vitpar.data.shards.shard_set import ShardSet

        if not self.task().OUTPUTS_ARE_LABELS:
            return images, None
        classes = self.config.num_classes
        names = read_class_names(self.folder, classes)
        match = match_classes(names, images)
        if match.kind == "moved":
            assert match.outputs is not None and names is not None and isinstance(images, ShardSet)
            return images.relabelled(names, match.outputs), match.words
        instead = "give the data they were trained on, or data with some of its classes, with --data"
        if match.kind == "mixed":
            raise DataError(f"{match.words}: {instead}")
        if images.num_classes != classes:
            raise DataError(
                f"'{images.place}' has {images.num_classes} classes but the weights in '{self.folder}' have {classes}: "
                f"{instead}"
            )
        return images, f"{match.words}: they are compared by number" if match.words else None

    def encoder(self) -> SavedModel:
        """Return the model whose features are wanted: this one, or that which its pretraining is for, as of an MAE."""
        if self.config.pretrained is None:
            return self
        config = self.config.pretrained[0]
        recipe = self.recipe.model_copy(update={"task": TaskSection(), "model": ModelSection(name=config.name)})
        return replace(self, config=config, recipe=recipe)

    def planned(self, device: str | None) -> PlannedModel:
        """Return the model with its plan, on `device` or the default one.

        Raises LaunchError, RecipeError and StrategyError for settings that do not fit device, ranks, model or batch.
        """
        from vitpar.tasks.data import refuse_streamed_targets, transforms

        device_type = choose_device(device)
        recipe = on_device(self.recipe, device_type)
        if self.config.input.dtype is None:
            transforms(recipe, self.config.image_size)
        chosen = choose_plan(recipe, self.config, device_type)
        refuse_streamed_targets(recipe, self.task(), self.config, chosen.plan)
        return PlannedModel(self.folder, self.config, recipe, device_type, chosen)

    @contextmanager
    def on_device(self, at_once: int, device: str | None = None) -> Iterator[tuple[ParallelModel, ImageInput]]:
        """Yield the model on one device, and its input of single images, which leaves out those that cannot be read.

        at_once: images that are computed at a time.

        Raises as `planned` does.
        """
        recipe = self.recipe.updated(train={"batch_size": at_once}, data={"bad_sample": "skip"})
        planned = replace(self, recipe=recipe).planned(device)
        from vitpar.tasks.image_input import ImageInput

        with in_world(planned.device_type) as place:
            model, warning = planned.built(place)
            if warning:
                complain(f"warning: {warning}")
            yield model, ImageInput(planned.recipe, model, planned.task())


@dataclass(frozen=True)
class PlannedModel(SavedModel):
    """Saved weights with a plan to compute with them. Their recipe is adapted to the device."""

    device_type: Device
    """Type of the device."""
    chosen: Chosen
    """Plan."""

    def built(
        self, device: torch.device, data: Mapping[str, ImageSet] | None = None
    ) -> tuple[ParallelModel, str | None]:
        """Return the model with its weights on this rank, and a warning on its speed. Collective.

        data: data sets that are evaluated, by name, to compare between ranks; None for none.

        Raises RecipeError if ranks disagree.
        """
        from vitpar.parallel import Execution, parallelize
        from vitpar.parallel.attention import choose_attention
        from vitpar.parallel.compiling import choose_compiling
        from vitpar.training.begin import fill, opened_for
        from vitpar.training.build import refuse_disagreement
        from vitpar.weights.folder import fingerprint
        from vitpar.weights.importing import CLASSIFIERS

        train, plan = self.recipe.train, self.chosen.plan
        refuse_disagreement(self.recipe, plan, data or {}, {"the content of --checkpoint": fingerprint(self.folder)})
        compiled = choose_compiling(train.compile, plan, train.precision, device).blocks
        execution = Execution(
            train.batch_size,
            train.precision,
            compile=compiled,
            fp8_min_features=train.fp8_min_features,
            fp8_fast_accum=train.fp8_fast_accum,
        )
        model = parallelize(self.config, plan, execution, device)
        attention = choose_attention(train.attention, self.config, plan, train.batch_size, model.precision, device)
        opened = opened_for(self.folder, self.config)
        fill(model, self.folder, opened, CLASSIFIERS if opened.changes else ())
        return model, attention.warning


def saved_model(
    checkpoint: Path, request: RecipeRequest, *, doing: str, mesh: str = "dp1", fetch: Callable[[Path], Path] = Path
) -> SavedModel:
    """Return the saved weights in `checkpoint` with their recipe. Raises DataError, CheckpointError and RecipeError.

    checkpoint: a run, saved weights or a checkpoint, or weights on the hub; of a run its final weights or, if it has
        not ended, its newest checkpoint.
    request: settings that replace those of the weights' recipe.
    doing: kind of command, a key of ``COMMANDS``.
    fetch: as in ``vitpar.training.prepare``.
    """
    checkpoint = fetch(checkpoint)
    if not checkpoint.is_dir():  # before torch is imported, which takes seconds
        raise DataError(f"'{checkpoint}' holds no weights (no such folder): give a run such as runs/mine")
    request.refuse_idle(doing)
    folder = weights_folder(checkpoint)
    from vitpar.weights.folder import RECIPE, open_weights

    config = open_weights(folder).config
    recipe = request.without_commands(read_recipe(folder / RECIPE, request.given, request.assignments))
    # Settings for speed in training are not part of the weights, and compiling takes longer than most evaluations.
    plain = {"attention": "auto", "compile": False}
    ours = {key: value for key, value in plain.items() if f"train.{key}" not in request.assigned}
    plan = {"parallel": ParallelSection(mesh=mesh), "communication": CommunicationSection()}
    recipe = recipe.model_copy(update={**plan, "lora": LoraSection()})  # adapters are merged
    return SavedModel(folder, config, recipe.updated(train=ours))
