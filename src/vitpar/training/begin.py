"""Initial weights from a folder: the recipe's `model.weights`, and those of plain models.

Parameters are those of the folder, under any plan. For fine-tuning, rows of the classifier are matched with the classes
of the data by name; it keeps its initial values if the data have other classes. Learned positions are interpolated if
images have another size. Of a masked autoencoder, a Vision Transformer takes the encoder. A model that averages tokens
takes weights with a class token, which becomes a register.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitpar.checkpoint.folder import Checkpoint
from vitpar.checkpoint.index import INDEX, read_class_names
from vitpar.data.stream.stream_set import ImageSet
from vitpar.errors import CheckpointError, ModelError, RecipeError
from vitpar.models.config import ModelConfig
from vitpar.models.description import MadeTensor
from vitpar.models.families import model_config
from vitpar.models.initial import copy_whole_, initialise
from vitpar.models.layers import PlainModel
from vitpar.models.lora import LoRA, adapters_of
from vitpar.parallel import ParallelModel
from vitpar.recipe import Recipe
from vitpar.recipe.file import read_section
from vitpar.recipe.sections.input import DataSection
from vitpar.tasks import Task
from vitpar.training.hub_weights import local_weights
from vitpar.training.optim.average import EMA
from vitpar.training.saving.resume import weights_folder
from vitpar.weights.adapters import read_adapters
from vitpar.weights.folder import RECIPE, load_weights, open_weights
from vitpar.weights.importing import CLASSIFIERS, POSITIONS, grid_of, resampled, resized

_OF_THE_RUN = (
    *("name", "num_classes", "image_size", "tokens", "decoder_tokens"),
    *("drop_path", "dropout", "layer_scale", "init"),
)
"""Model settings in which a run may differ from its initial weights: they change no parameter, or are adapted."""


@dataclass(frozen=True)
class Opened:
    """Weights to begin with."""

    config: ModelConfig
    """Configuration of their model."""
    read: Callable[[str], Tensor]
    """Function from the name of a parameter to its tensor."""
    changes: tuple[str, ...] = ()
    """Differences from what the folder has, as sentences; none for weights that are used as they are."""
    kept: tuple[str, ...] = ()
    """Parameters besides the classifier that keep their initial values."""


@dataclass(frozen=True)
class Beginning:
    """How a run starts from its initial weights."""

    weights: Opened
    """The weights."""
    notes: tuple[str, ...]
    """Differences, as sentences."""
    new_classifier: bool
    """Whether the classifier keeps its initial values."""
    outputs: tuple[int, ...] | None
    """Row of the weights' classifier for each class of the data; None to keep their order."""


def opened_for(folder: Path, config: ModelConfig) -> Opened:
    """Open the weights in `folder` for the model `config`, which has no adapters.

    Raises DataError for weights that cannot be read, and RecipeError for those of another model.
    """
    weights = open_weights(folder)
    opened, pretrained = Opened(weights.config, weights.read), None
    if type(weights.config) is not type(config):
        pretrained = weights.config.pretrained
    if pretrained is not None and (type(pretrained[0]) is type(config) or config.adapted(pretrained[0])):
        change = f"the encoder of {weights.config.name} is used; what only pretraining needs is left out"
        opened = Opened(pretrained[0], _made(pretrained[1], weights.read), (change,))
    if adapted := config.adapted(opened.config):
        read = _made(adapted.tensors, opened.read)
        opened = Opened(adapted.config, read, (*opened.changes, adapted.change), adapted.kept)
    there = opened.config
    if type(there) is not type(config):
        raise RecipeError(
            f"the weights in '{folder}' are of the family {there.FAMILY}, but {config.name} is of {config.FAMILY}: "
            f"use their model, as with --recipe {folder / RECIPE}"
        )
    other = [
        f"{field.name} is {getattr(config, field.name)} but {getattr(there, field.name)} in the weights"
        for field in fields(config)  # type: ignore[arg-type]
        if field.name not in _OF_THE_RUN and getattr(config, field.name) != getattr(there, field.name)
    ]
    scales = [getattr(one, "layer_scale", None) for one in (config, there)]
    if (scales[0] is None) != (scales[1] is None):
        words = [scale or "not set" for scale in scales]
        other.append(f"layer_scale is {words[0]} but {words[1]} in the weights")
    if other:
        raise RecipeError(
            f"the weights in '{folder}' do not match the model: {'; '.join(other)}: use their model, as with --recipe "
            f"{folder / RECIPE}"
        )
    return opened


def _made(tensors: Mapping[str, MadeTensor], read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Return a function like `read` that makes the given parameters of those that `read` returns."""
    return lambda name: tensors[name].make(*map(read, tensors[name].names)) if name in tensors else read(name)


def beginning(recipe: Recipe, config: ModelConfig, task: Task, data: ImageSet) -> Beginning:
    """Return how the run starts from the recipe's initial weights. Raises as `opened_for` does.

    config: configuration of the run.
    task: matches the outputs of the weights with the data.
    data: training set.
    """
    assert recipe.model.weights is not None
    folder, config = Path(recipe.model.weights), config.unadapted
    weights = opened_for(folder, config)
    there, changed = weights.config, bool(weights.changes)
    notes = list(weights.changes)
    match = task.match(None if changed else read_class_names(folder, there.num_classes), data)
    new = (
        changed
        or match.kind in ("other", "mixed")
        or (match.kind == "unnamed" and config.num_classes != there.num_classes)
    )
    if new and config.classifiers:
        why = "the weights have none" if changed else match.words or f"the weights have {there.num_classes:,}"
        notes.append(f"the classifier of {config.num_classes:,} classes is newly initialised ({why})")
    elif match.words:
        notes.append(match.words)
    if config.image_size != there.image_size:
        notes.append(resized(there, config))
    known = read_section(folder / RECIPE, "data", DataSection)
    for name in ("mean", "std"):
        if (mine := getattr(recipe.data, name)) != (theirs := getattr(known, name)):
            notes.append(f"images are normalised with {name} {mine}, but with {theirs} for the weights")
    return Beginning(weights, tuple(notes), new, match.outputs)


@torch.no_grad()
def begin_adapters(model: ParallelModel, recipe: Recipe, ema: EMA | None = None) -> str:
    """Fill the adapters of `model`, and what was trained with them, from `lora.weights`; return a message. Collective.

    Raises DataError for adapters of another model.
    """
    assert recipe.lora.weights is not None and isinstance(model.config, LoRA)
    made = read_adapters(Path(recipe.lora.weights), model.config)
    for name, parameter in model.named_parameters():
        if (owner := model.config.owner(name)) in made:
            copy_whole_(parameter, made[owner])
    model.parameters_changed()
    if ema:
        ema.restart()
    return f"adapters are loaded from {recipe.lora.weights}"


@torch.no_grad()
def begin(model: ParallelModel, recipe: Recipe, task: Task, data: ImageSet, ema: EMA | None = None) -> str:
    """Fill `model` and its averages from the recipe's weights, and return a message for the user. Collective.

    model: has its initial values, which parameters without weights keep.
    data: training set.

    Raises what `beginning` does, and CheckpointError for a checkpoint that is damaged.
    """
    start = beginning(recipe, model.config, task, data)
    assert recipe.model.weights is not None
    folder, weights = Path(recipe.model.weights), start.weights
    kept = {*weights.kept, *adapters_of(model.config)}
    if start.new_classifier or start.outputs is not None:
        kept |= {*CLASSIFIERS}
    fill(model, folder, weights, kept)
    for name, parameter in model.named_parameters():
        if name in CLASSIFIERS and start.outputs is not None:
            copy_whole_(parameter, weights.read(name)[list(start.outputs)])
    model.parameters_changed()
    if ema:
        ema.restart()
    return "; ".join((f"parameters are loaded from {folder}", *start.notes))


@torch.no_grad()
def fill(model: ParallelModel | PlainModel, folder: Path, weights: Opened, kept: Collection[str]) -> None:
    """Fill the parameters of `model`, but those `kept`, from `weights`, opened in `folder`. Collective.

    Learned positions are interpolated if images have another size.

    Raises DataError and CheckpointError for damaged files.
    """
    config = model.config.unadapted
    resized = {POSITIONS} if config.image_size != weights.config.image_size else set[str]()
    if isinstance(model, ParallelModel) and not weights.changes:
        load_weights(model, folder, {*kept, *resized})
        kept = [name for name, _ in model.named_parameters()]
    elif (folder / INDEX).exists() and isinstance(model, ParallelModel):
        Checkpoint.open_whole(folder)  # verifies the files
    elif (folder / INDEX).exists() and (wrong := Checkpoint.open(folder).damage()):  # without a process group
        raise CheckpointError(f"the checkpoint '{folder}' is damaged: {wrong}")
    for name, parameter in model.named_parameters():
        if name in resized:
            copy_whole_(parameter, resampled(weights.read(name), *grid_of(config, parameter.shape)))
        elif name not in kept:
            copy_whole_(parameter, weights.read(name))
    if isinstance(model, ParallelModel):
        model.parameters_changed()


def create_model(
    name: ModelConfig | str | None = None,
    *,
    weights: Path | str | None = None,
    num_classes: int | None = None,
    seed: int = 0,
    **options: Any,
) -> PlainModel:
    """Return a model as a plain ``nn.Module``: float32, on the CPU, in training mode, from normalised images to logits.

    name: name or configuration of the model; None for that of the weights.
    weights: a run, saved weights, a checkpoint, or hf:OWNER/NAME; None for initial values.
    num_classes: outputs, by default as many as the weights have, or else 1,000. The classifier is newly initialised if
        the weights have another number, or were adapted to the model.
    seed: seed of initial values, as train.seed.
    options: further fields of the configuration, such as drop_path=0.1.

    Raises ModelError, DataError and CheckpointError, and RecipeError for weights of another model.
    """
    folder = None if weights is None else weights_folder(local_weights(Path(weights).expanduser()))
    saved = None if folder is None else open_weights(folder).config
    options |= {} if num_classes is None else {"num_classes": num_classes}
    if isinstance(name, str):
        config = model_config(name, **({"num_classes": saved.num_classes} if saved else {}) | options)
    elif (known := name or saved) is not None:
        config = replace(known, **options)  # type: ignore[type-var]
    else:
        raise ModelError("a model needs a name or weights: give one of the two")
    model = PlainModel(config)
    initialise(model, seed, config)
    model.tie()
    if folder is not None:
        opened = opened_for(folder, config)
        new = bool(opened.changes) or config.num_classes != opened.config.num_classes
        fill(model, folder, opened, {*opened.kept, *(CLASSIFIERS if new else ())})
    return model
