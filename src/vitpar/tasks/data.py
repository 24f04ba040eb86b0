"""Data of a recipe, without torch: sets, order of samples, transforms, decoding threads, and the model that follows."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitpar.data.cache import Shape, refuse_unequal, stored_shape
from vitpar.data.images import GPU_DECODED_BYTES
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards.index import Labels
from vitpar.data.shards.manifest import has_manifest, read_manifest
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.stream.stream_set import ImageSet, StreamSet
from vitpar.data.stream.urls import expand
from vitpar.data.survey import some_sizes
from vitpar.data.text.text_set import TextSet
from vitpar.data.transforms import DEVICE_KERNELS
from vitpar.data.transforms.policies import parse_policy
from vitpar.errors import DataError, RecipeError, StrategyError
from vitpar.models.config import ModelConfig
from vitpar.recipe import Recipe
from vitpar.recipe.request import classes_of
from vitpar.strategy import Plan
from vitpar.strategy.stages import images_are_at_outputs
from vitpar.tasks.known import task_class, task_of
from vitpar.tasks.task import Task
from vitpar.text import either, shown

if TYPE_CHECKING:  # they import torch, which `vitpar --help` does not wait for
    from vitpar.data.transforms.batch import Mix, Normalize
    from vitpar.data.transforms.sample import EvalTransform, TrainTransform

MOST_THREADS = {"cuda": 16, "cpu": 2}
"""Most decoding threads of a rank by default. On CPUs the model computes on the same cores."""
SMALL = 96 * 96
"""Pixels of a stored image up to which several threads are slower than one: each holds Python's lock for most of its
time, and handing it over takes longer than an operation on such an image
(experiments/results/decoding_threads_2core_2026-11-28.md)."""


def open_split(recipe: Recipe, split: str) -> ImageSet:
    """Return one split of a recipe's data; a stream has `train` and `val`.

    Raises DataError, and RecipeError for a stream of text.
    """
    s, is_text = recipe.stream, task_class(recipe).INPUT == "text"
    if recipe.data.path is not None:
        return (TextSet if is_text else ShardSet).open(recipe.data.path, split)
    if is_text:
        raise RecipeError(f"task '{recipe.task.name}' reads packed text, not a stream: name a folder with --data")
    sides = {"train": (s.train, s.samples), "val": (s.val, s.val_samples)}
    if split not in sides:
        raise DataError(f"no split '{split}' in a stream: it has train and val")
    patterns, samples = sides[split]
    assert patterns is not None and samples is not None and s.classes is not None, "the recipe has checked it"
    labels = Labels.parse(s.label)
    return StreamSet(expand(patterns), samples, s.classes, labels, s.shuffle_buffer, s.allow_pipe)


def open_data(recipe: Recipe, train: ImageSet | None = None) -> tuple[ImageSet, ImageSet | None]:
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


def transforms(recipe: Recipe, size: int) -> tuple[TrainTransform, EvalTransform, Normalize]:
    """Return the transforms for training and evaluation, to images of `size` pixels, and normalisation.

    Raises RecipeError for a setting out of its range.
    """
    from vitpar.data.transforms.batch import Normalize
    from vitpar.data.transforms.sample import EvalTransform, TrainTransform

    d, a = recipe.data, recipe.augment
    train = TrainTransform(
        size,
        d.crop_scale,
        d.crop_ratio,
        d.flip,
        d.interpolation,
        policy=parse_policy(a.policy) if a.policy else None,
        color_jitter=a.color_jitter if isinstance(a.color_jitter, tuple) else (a.color_jitter,) * 3,
        erase=a.random_erasing,
        mean=d.mean,
        std=d.std,
        padding=d.crop_padding,
    )
    on_device = next((key for key in ("cache", "decode") if getattr(d, key) == "device"), None)
    if on_device and d.crop_padding is None and d.interpolation not in DEVICE_KERNELS:
        raise RecipeError(
            f"data.interpolation is '{d.interpolation}', by which data.{on_device} 'device' does not resize crops: use "
            f"{either(DEVICE_KERNELS)}, or leave data.{on_device} out"
        )
    return train, EvalTransform(size, d.crop_pct, d.interpolation, d.crop_mode, d.mean), Normalize(d.mean, d.std)


def mixing(recipe: Recipe) -> Mix:
    """Return the recipe's mixup and CutMix."""
    from vitpar.data.transforms.batch import Mix

    a = recipe.augment
    return Mix(a.mixup, a.cutmix, a.mixup_prob, a.mixup_switch_prob, apart=a.repeats)


def write_preview(recipe: Recipe, path: Path) -> None:
    """Write the contact sheet of the recipe's training split to a PNG file. Raises DataError and RecipeError."""
    from vitpar.data.survey import contact_sheet

    assert recipe.data.path is not None, "the caller has named it"
    shards = ShardSet.open(recipe.data.path, "train")
    train, evaluation, _ = transforms(recipe, recipe.config(len(shards.classes)).image_size)
    contact_sheet(shards, evaluation, train, mixing(recipe), order_of(recipe, len(shards))).save(path, "PNG")


def check_images(recipe: Recipe, size: int, train: ImageSet) -> None:
    """Refuse what the settings of images of `size` pixels, and the training images, rule out.

    Raises RecipeError for a setting out of its range, and DataError for images of several sizes that a device is to
    hold.
    """
    transforms(recipe, size)
    if recipe.data.cache == "device" and isinstance(train, ShardSet):
        refuse_unequal(train)


def held_shapes(train: ShardSet, val: ShardSet | None, size: int) -> list[Shape]:
    """Return the shapes of the images that a device holds with data.cache 'device', of each set.

    Those of `val` are as evaluation takes them, with `size` pixels, and one more that stands for padding.

    Raises DataError if the first image cannot be read.
    """
    shapes = [stored_shape(train)]
    return shapes if val is None else [*shapes, (len(val) + 1, shapes[0][1], size, size)]


def held_bytes(recipe: Recipe, config: ModelConfig) -> int:
    """Return the bytes of images that each GPU holds in a training, or decodes at a time.

    What changes images after their crop needs up to 330 MB more, which is free again before the model computes.

    Raises DataError for data that cannot be read.
    """
    path = recipe.data.path
    if recipe.data.decode == "device":
        return GPU_DECODED_BYTES
    if recipe.data.cache != "device" or path is None or not has_manifest(path):
        return 0
    has_val = "val" in read_manifest(path).splits
    shapes = held_shapes(
        ShardSet.open(path, "train"), ShardSet.open(path, "val") if has_val else None, config.image_size
    )
    return sum(map(math.prod, shapes))


def refuse_streamed_targets(recipe: Recipe, task: Task, config: ModelConfig, plan: Plan) -> None:
    """Refuse a stream that the task does not read, or of which ranks make targets that do not take its images.

    Raises RecipeError and StrategyError.
    """
    if recipe.stream and task.AVERAGES:
        raise RecipeError(f"task '{shown(task.NAME)}' does not read streams: pack the data, or index the shards")
    if recipe.stream and task.IMAGE_TARGETS and not images_are_at_outputs(config, plan):
        raise StrategyError(
            f"task '{shown(task.NAME)}' needs streamed images on all ranks that give outputs: pack the data, or leave "
            "pp and +sp out of the plan"
        )


def order_of(recipe: Recipe, samples: int) -> SampleOrder:
    """Return the order of `samples` training samples."""
    data, augment = recipe.data, recipe.augment
    return SampleOrder(recipe.train.seed, samples, augment.repeats, data.shuffle_block, data.shuffle_window)


def decoding_threads(recipe: Recipe, device_type: str, cores: float, *, small: bool) -> int:
    """Return the decoding threads of a rank: ``data.workers``, or by default its share of the machine's cores.

    By default a rank with a GPU leaves one core to the thread that launches kernels. The number changes the speed only.

    cores: cores of the rank (``LocalRanks.cores``).
    small: whether `are_small` is true for its images.
    """
    if recipe.data.workers is not None:
        return recipe.data.workers
    # Threads that draw for images held on a GPU have a limit of their own (vitpar.data.loader).
    one = small and (device_type == "cpu" or recipe.data.cache != "device")
    most = 1 if one else MOST_THREADS[device_type]
    return max(1, min(most, int(cores) - 1 if device_type == "cuda" else int(cores)))


def are_small(images: object) -> bool:
    """Return whether the images of a packed set on a disk have SMALL pixels or fewer, by some of them.

    False for other sets: threads that read from elsewhere wait for each image.
    """
    pixels = []
    if isinstance(images, ShardSet) and isinstance(images.folder, Path):
        with suppress(DataError):  # of a missing shard, which is reported where it is needed
            pixels = [height * width for _, height, width in some_sizes(images, 8)]
    return bool(pixels) and max(pixels) <= SMALL
