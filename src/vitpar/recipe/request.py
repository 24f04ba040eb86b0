"""Request for a recipe: a file, and the settings of options and ``--set`` that replace its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitpar.errors import RecipeError
from vitpar.recipe.defaults import FEW_IMAGES, FINE_TUNED, SIZES, TASKS, TINY_IMAGES, for_fine_tuning, with_defaults
from vitpar.recipe.effects import COMMANDS
from vitpar.recipe.file import DEFAULT_RECIPE, read_recipe, refuse_unknown_key
from vitpar.recipe.recipe import Recipe
from vitpar.recipe.sections.input import CLASSIFY, TEXT
from vitpar.recipe.sections.running import AUTO, refuse_missing
from vitpar.strategy import parse
from vitpar.text import either, shown

if TYPE_CHECKING:
    from vitpar.data.shards.shard_set import ShardSet

NO_DATA = {"data.path": "unused", "train.steps": 1}
"""Values of the settings that every recipe must have, for commands that neither read data nor train."""


@dataclass(frozen=True)
class Merged:
    """Recipe that a request makes."""

    recipe: Recipe
    """Recipe with all settings."""
    samples: int | None = None
    """Number of training samples whose defaults it has; None for fixed defaults."""
    opened: ShardSet | None = None
    """Training set, if it was opened."""
    hints: tuple[str, ...] = ()
    """Sentences for the user on what the defaults chose."""


@dataclass(frozen=True)
class RecipeRequest:
    """Recipe file, and settings that replace its own."""

    path: Path | None = None
    """Recipe file; None for none."""
    given: Mapping[str, object] = field(default_factory=dict)
    """Settings by dotted key; None for one that is not given."""
    assignments: Sequence[str] = ()
    """Further settings, as ``section.key=value``; they win over `given`."""

    def __or__(self, given: Mapping[str, object]) -> RecipeRequest:
        """Return the request with further settings `given`."""
        return replace(self, given={**self.given, **given})

    @property
    def assigned(self) -> list[str]:
        """Keys of `assignments`."""
        return [assignment.partition("=")[0].strip() for assignment in self.assignments]

    @property
    def names_data(self) -> bool:
        """Whether settings name data."""
        keys = [key for key, value in self.given.items() if value is not None] + self.assigned
        return any(key == "data.path" or key.startswith("stream.") for key in keys)

    def refuse_early(self) -> None:
        """Raise UserError for a strategy, data set or tracker that cannot be used, before any file is read."""
        mesh, data, trackers = (self.given.get(key) for key in ("parallel.mesh", "data.path", "track.trackers"))
        if isinstance(mesh, str) and mesh != AUTO and not mesh.endswith(".json"):
            parse(mesh)
        if isinstance(trackers, tuple):
            refuse_missing(trackers)
        if isinstance(data, str):
            from vitpar.data.shards.manifest import has_manifest, read_manifest

            if not has_manifest(data):
                read_manifest(data)  # raises

    def refuse_idle(self, doing: str) -> None:
        """Raise RecipeError for an assignment without effect on a command. doing: its kind, a key of ``COMMANDS``."""
        used = COMMANDS[doing]
        for key in self.assigned:
            refuse_unknown_key(key)
            # Weights change no shape, plan or time, so only training uses them.
            if key == "model.weights" or (key not in used and f"{key.partition('.')[0]}.…" not in used):
                raise RecipeError(
                    f"--set {shown(key)} changes nothing in {doing}, which uses {', '.join(used)}: leave it out"
                )

    def read(self, without: Collection[str] = ()) -> Recipe:
        """Return the recipe. Without a file and without data it is the shipped digits recipe. Raises RecipeError.

        without: sections of the file to leave out.
        """
        if self.path is not None or self.given.get("data.path") is not None:
            return read_recipe(self.path, self.given, self.assignments, without=without)
        # A model that is named without a recipe is the published one, so it must not get the digits recipe's options.
        named = self.given.get("model.name") is not None
        return read_recipe(DEFAULT_RECIPE, self.given, self.assignments, without=("model",) if named else ())

    def read_with_defaults(self, without: Collection[str] = ()) -> Merged:
        """Return the recipe of a training. Raises RecipeError and DataError.

        If data is named without a recipe file, defaults for the task and the number of its samples
        (``vitpar.recipe.defaults``) fill the settings that are not given, and for a run that begins with
        weights those for fine-tuning. Otherwise the recipe is that of `read`.
        """
        if self.path is not None or not self.names_data:
            return Merged(self.read(without))
        begun = read_recipe(None, self.given, self.assignments, needs_length=False)
        if begun.model.weights is not None:
            return Merged(for_fine_tuning(begun))
        if begun.data.path is None:
            streamed = begun.stream.samples
            assert streamed is not None, "the recipe has checked it"
            return Merged(with_defaults(begun, streamed), streamed)
        from vitpar.data.shards.manifest import read_manifest

        manifest = read_manifest(begun.data.path)
        task, path = begun.task.name, shown(begun.data.path)
        if manifest.text is None and task in TEXT:
            raise RecipeError(
                f"'{path}' holds images, but task '{task}' reads text: leave --task out, or pack text with `vitpar "
                "data pack SRC DST --tokens N`"
            )
        if manifest.text is not None:
            if task == CLASSIFY:
                raise RecipeError(
                    f"'{path}' holds text, which task '{CLASSIFY}' does not read: give --task {either(TEXT)}"
                )
            samples = manifest.splits["train"].samples
            return Merged(with_defaults(begun, samples), samples)
        from vitpar.data.shards.shard_set import ShardSet
        from vitpar.data.survey import shorter_side

        shards = ShardSet.open(begun.data.path, "train")
        # Images are opened only to choose a model.
        side = None if "name" in begun.model.model_fields_set else shorter_side(shards)
        recipe = with_defaults(begun, len(shards), side)
        return Merged(recipe, len(shards), shards, tuple(_hints(recipe, begun, len(shards))))

    def without_commands(self, recipe: Recipe) -> Recipe:
        """Return a recipe with ``stream.allow_pipe`` and ``checkpoint.copy_to`` off, unless an assignment gives them.

        For a recipe that came with weights or a checkpoint: the user may not have read it, so its URLs may run
        commands, and the run may be sent elsewhere, only with the user's new consent.
        """
        if "stream.allow_pipe" not in self.assigned and recipe.stream.allow_pipe:
            recipe = recipe.updated(stream={"allow_pipe": False})
        if "checkpoint.copy_to" not in self.assigned and recipe.checkpoint.copy_to:
            recipe = recipe.updated(checkpoint={"copy_to": None})
        return recipe


def _hints(recipe: Recipe, begun: Recipe, images: int) -> Iterator[str]:
    """Yield sentences on the default model, and on few images. begun: recipe before its defaults."""
    name, chosen = recipe.model.name, "name" not in begun.model.model_fields_set and recipe.task.name not in TASKS
    if chosen and SIZES[0] not in name and images <= TINY_IMAGES:
        yield f"the model is {name}: '{shown(begun.parallel.mesh)}' cannot split the heads of ViT-Ti"
    if recipe.task.name == CLASSIFY and images < FEW_IMAGES:
        yield (
            f"{images:,} training images are few to train from scratch: fine-tuning published weights usually gives "
            f"more, as in vitpar train --weights hf:timm/{FINE_TUNED} --data {recipe.data.path}"
        )


def classes_of(recipe: Recipe, given: int | None, default: int) -> int:
    """Return `given`, else the number of classes of the recipe's data if they can be found, else `default`.

    Classes of text are the tokens of its vocabulary.
    """
    from vitpar.data.shards.manifest import has_manifest, read_manifest

    path = recipe.data.path
    if given is None and path is not None and has_manifest(path):
        manifest = read_manifest(path)
        return len(manifest.classes) if manifest.text is None else manifest.text.vocab_size
    return given or recipe.stream.classes or default
