"""Default settings by the size of the training set, from published recipes, for training from initial values.

`vitpar train` uses them, with options on top, when data is named but no recipe. A recipe file has fixed defaults
instead (``vitpar.recipe.sections``), so its meaning does not depend on the data. docs/defaults.md has the table.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from vitpar.errors import UserError
from vitpar.models.config import ModelConfig, field_names
from vitpar.recipe.effects import OF_CLASSES, STREAM_CANNOT, idle_settings
from vitpar.recipe.file import checked, read_recipe
from vitpar.recipe.recipe import Recipe
from vitpar.recipe.sections.input import CLASSIFY
from vitpar.strategy import validate

MAX_WARMUP = 0.1
"""Largest fraction of a run that is warm-up. It is that of 2112.13492 and limits short runs of the other recipes."""
MAX_LR = 2e-3
"""Largest learning rate after scaling by the batch: above the published ones at 4,096 images."""
LAMB_LR, LAMB_BATCH = 3e-3, 2048
"""Learning rate of LAMB and its batch size, from DeiT III (2204.07118)."""
IMAGENET_1K = 1_281_167
"""Training images of ImageNet-1k, which stand for a data set that is unknown."""
SMALL_IMAGE = 64
"""Largest image size, in pixels a side, that is cropped like CIFAR."""
SMALL = {"data.crop_scale": (0.8, 1.0), "data.crop_pct": 1.0}
"""Settings for images of up to `SMALL_IMAGE` pixels a side."""
PATCHES = ((16, 2), (48, 4), (128, 8))
"""Largest shorter side of images in pixels, and the side of a patch for images of up to that size."""
TINY_IMAGES = 100_000
"""Largest training set for which ViT-Ti is the default model."""
SIZES = ("tiny", "small", "base", "large")
"""Sizes of ViT from which the default model is taken."""
FEW_IMAGES = 20_000
"""Number of images below which fine-tuning is advised."""
FINE_TUNED = "vit_small_patch16_224.augreg_in21k_ft_in1k"
"""timm's name, on the hub, of weights to fine-tune."""
CONTINUED: dict[str, dict[str, Any]] = {
    "dino": {
        "optimizer.weight_decay": 0.04,
        "optimizer.layer_decay": 0.9,
        "train.epochs": 20,
        "train.clip_grad_norm": 3.0,
        "train.clip_by_part": True,
        "train.ema_decay": 0.996,
        "train.ema_decay_end": 1.0,
        "data.crop_scale": (0.32, 1.0),
        "task.options.heads_first": 0.1,
        "task.options.backbone_rate": 0.02,
    }
}
"""Settings of tasks that go on with weights of another task, by dotted key. The rate is that of the task's defaults."""
FINE_TUNING = {"optimizer.lr": 1e-4, "train.epochs": 10}
"""Settings of a run that starts from weights, by dotted key."""


@dataclass(frozen=True)
class DefaultsRow:
    """Settings for training sets of up to `most` images."""

    most: int | None
    """Largest training set; None for any."""
    example: str
    """Name of a data set of this size, or of the model that a task's published data are for."""
    lr: float
    """Learning rate of AdamW at a batch size of `batch`."""
    batch: int
    """Batch size of the published recipe."""
    epochs: int
    """Epochs of the run."""
    warmup_epochs: float
    """Epochs of linear warm-up."""
    settings: Mapping[str, Any]
    """Other settings by dotted key."""
    sources: str
    """Publications of the figures, with arXiv numbers."""
    larger: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ for models larger than ViT-B, by dotted key; the key `lr` replaces the field `lr`."""
    model: str = ""
    """Default model of a task; {} stands for the size of patches and images. Empty for classification."""
    samples: int = IMAGENET_1K
    """Samples of the published training set, which stand for data that are unknown."""


_MIXED = {"augment.mixup": 0.8, "augment.cutmix": 1.0}
_RAND = {"augment.policy": "rand-m9-mstd0.5-inc1"}
_DEIT = {
    **_RAND,
    **_MIXED,
    "augment.random_erasing": 0.25,
    "augment.repeats": 3,
    "train.label_smoothing": 0.1,
    "model.drop_path": 0.1,
    "optimizer.weight_decay": 0.05,
}

ROWS = (
    DefaultsRow(
        10_000,
        "Flowers-102",
        *(5e-4, 96),
        epochs=300,
        warmup_epochs=10,
        settings={
            **_RAND,
            **_MIXED,
            "data.crop_scale": (0.8, 1.0),
            "train.label_smoothing": 0.1,
            "model.drop_path": 0.1,
            "optimizer.weight_decay": 0.06,
        },
        sources="Compact Transformers (2104.05704), its published configuration for Flowers-102",
    ),
    DefaultsRow(
        100_000,
        "CIFAR, Tiny-ImageNet",
        *(1e-3, 128),
        epochs=100,
        warmup_epochs=10,
        settings={**_DEIT, "augment.mixup": 1.0, "augment.mixup_prob": 0.5},
        sources="Vision Transformer for Small-Size Datasets (2112.13492), 93.6 % on CIFAR-10 with a plain ViT of 2.8 M "
        "parameters. Two settings are from Compact Transformers (2104.05704): RandAugment replaces the CIFAR policy, "
        "and crops of 0.8 to 1 of small images replace padding",
    ),
    DefaultsRow(
        500_000,
        "ImageNet-100",
        *(1e-3, 1024),
        epochs=300,
        warmup_epochs=10,
        settings=_DEIT,
        sources="DeiT (2012.12877), as for ImageNet-1k. Epochs are shorter, so the warm-up has as many as in the rows "
        "above",
        larger={"model.drop_path": 0.2},
    ),
    DefaultsRow(
        2_000_000,
        "ImageNet-1k",
        *(1e-3, 1024),
        epochs=300,
        warmup_epochs=5,
        settings=_DEIT,
        sources="DeiT (2012.12877), 79.8 % with ViT-S and 81.8 % with ViT-B. Drop-path of larger models: training from "
        "scratch in Masked Autoencoders (2111.06377, A.2)",
        larger={"model.drop_path": 0.2},
    ),
    DefaultsRow(
        50_000_000,
        "ImageNet-21k",
        *(1e-3, 4096),
        epochs=30,
        warmup_epochs=3,
        settings={"augment.policy": "rand-m10-n2-p1", "augment.mixup": 0.2, "optimizer.weight_decay": 0.1},
        sources="How to train your ViT (2106.10270): light2 for ViT-B/16, medium2 for ViT-L/16, the shorter of its "
        "runs of 30 and 300 epochs, warm-up of 10,000 steps",
        larger={"augment.mixup": 0.5, "model.drop_path": 0.1},
    ),
    DefaultsRow(
        None,
        "JFT-300M",
        *(8e-4, 4096),
        epochs=7,
        warmup_epochs=0.14,
        settings={"optimizer.weight_decay": 0.1},
        sources="An Image is Worth 16x16 Words (2010.11929), tables 3 and 4, warm-up of 10,000 steps",
        larger={"lr": 4e-4},
    ),
)
"""Table of defaults, by increasing size of the training set."""

TASKS = {
    "mae": DefaultsRow(
        2_000_000,
        "ImageNet-1k",
        *(1.5e-4, 256),
        epochs=800,
        warmup_epochs=40,
        settings={
            "data.crop_scale": (0.2, 1.0),
            "optimizer.name": "adamw",
            "optimizer.weight_decay": 0.05,
            "optimizer.betas": (0.9, 0.95),
        },
        sources="crops of 0.2 to 1, flips, AdamW with betas 0.9 and 0.95 and weight decay 0.05, a rate of 1.5e-4 for "
        "256 images that grows with the batch (2111.06377)",
        model="mae_vit_base_{}",
    ),
    "dino": DefaultsRow(
        None,
        "ImageNet-1k",
        *(4e-3, 1024),
        epochs=100,
        warmup_epochs=10,
        settings={
            "optimizer.name": "adamw",
            "optimizer.lr_scaling": "sqrt",
            "data.crop_scale": (0.32, 1.0),
            "optimizer.weight_decay": 0.04,
            "optimizer.weight_decay_end": 0.4,
            "optimizer.layer_decay": 0.9,
            "lr_schedule.min_lr": 1e-6,
            "train.clip_grad_norm": 3.0,
            "train.clip_by_part": True,
            "train.ema_decay": 0.992,
            "train.ema_decay_end": 1.0,
            "model.drop_path": 0.3,
            "model.layer_scale": 1e-5,
        },
        sources="global crops of 0.32 to 1, AdamW with a rate of 4e-3 for 1,024 images that grows with the root of the "
        "batch, weight decay that rises from 0.04 to 0.4, layer decay 0.9, clipping of backbone and heads at 3 each, "
        "an average whose decay rises from 0.992 to 1, drop-path 0.3, layer scale 1e-5 (2304.07193, the short "
        "configuration of its code)",
        model="dino_vit_small_{}",
    ),
    "mlm": DefaultsRow(
        None,
        "BERT",
        *(1e-4, 256),
        epochs=40,
        warmup_epochs=0.4,
        settings={"optimizer.name": "adamw", "optimizer.weight_decay": 0.01, "lr_schedule.shape": "linear"},
        sources="AdamW with weight decay 0.01, a rate of 1e-4 for 256 sequences that grows with the batch and falls "
        "linearly to 0 (1810.04805, A.2)",
        model="bert_base",
        samples=6_400_000,
    ),
    "span": DefaultsRow(
        None,
        "T5",
        *(1e-2, 128),
        epochs=64,
        warmup_epochs=0,
        settings={"optimizer.name": "adafactor", "lr_schedule.shape": "constant"},
        sources="Adafactor with a rate of 0.01 at any batch, which falls by itself (1910.10683, 3.1.2); up to 64 "
        "passes over the same data cost little (3.4.2)",
        model="t5_small",
        samples=2**20,
    ),
}
"""Defaults of other tasks than classification. Above `most` samples, epochs and warm-up are those of the table."""


def row_for(samples: int) -> DefaultsRow:
    """Return the row of the table for a training set of `samples` images."""
    return next(row for row in ROWS if row.most is None or samples <= row.most)


def row_of(task: str, samples: int | None) -> DefaultsRow:
    """Return the defaults of a task for a training set of `samples` samples; None stands for the published one."""
    row, own = row_for(samples or IMAGENET_1K), TASKS.get(task)
    if own is None or own.most is None or (samples or 0) <= own.most:
        return own or row
    return replace(own, epochs=row.epochs, warmup_epochs=row.warmup_epochs)


def default_model(samples: int, side: int | None, task: str = CLASSIFY, size: str = "") -> str:
    """Return the name of the model for a training set of `samples` samples.

    side: of the images, the shorter one in pixels; None for an unknown one.
    size: size of a ViT; empty for that of `samples`.
    """
    pixels, patch = 224, 16
    if side is not None:
        pixels, patch = next(((max(side // p, 1) * p, p) for most, p in PATCHES if side <= most), (pixels, patch))
    name = TASKS[task].model if task in TASKS else f"vit_{size or SIZES[samples > TINY_IMAGES]}_{{}}"
    return name.format(f"patch{patch}_{pixels}")


def with_defaults(recipe: Recipe, samples: int, side: int | None = None) -> Recipe:
    """Return `recipe` with the defaults of its task for `samples` training samples in the settings that it leaves out.

    side: of the images, the shorter one in pixels, for which a model is chosen; None for an unknown one.

    Raises RecipeError if a value contradicts one of the recipe, and ModelError for a wrong [model].
    """
    if "name" not in recipe.model.model_fields_set:
        recipe = _with_model(recipe, samples, side)
    return _filled(recipe, _table_settings(recipe, recipe.config(1), samples))


def for_fine_tuning(recipe: Recipe) -> Recipe:
    """Return `recipe`, which starts from weights, with FINE_TUNING or CONTINUED in the settings that it leaves out."""
    left = {"train.epochs"} if recipe.train.steps is not None else set()
    if (task := recipe.task.name) in CONTINUED:
        settings = {**CONTINUED[task], "optimizer.lr": _of_task(recipe, TASKS[task])["optimizer.lr"]}
        return _filled(recipe, {key: value for key, value in settings.items() if key not in left})
    left |= set() if recipe.optimizer.name in ("adamw", "adam") else {"optimizer.lr"}  # others have rates of their own
    return _filled(recipe, {key: value for key, value in FINE_TUNING.items() if key not in left})


def _filled(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Return `recipe` with `settings`, by dotted key, where it leaves them out."""
    left, idle = {**settings}, idle_settings(recipe)
    while left.keys() - idle.keys():
        values = recipe.model_dump(exclude_unset=True)
        for key in [key for key in left if key not in idle]:
            section, _, name = key.partition(".")
            inner, _, option = name.partition(".")
            place = values.setdefault(section, {})
            if option:
                place, name = place.setdefault(inner, {}), option
            place.setdefault(name, left.pop(key))
        recipe = checked(values)
        idle = idle_settings(recipe)  # some have an effect beside those that are set now
    return recipe


def _with_model(recipe: Recipe, samples: int, side: int | None) -> Recipe:
    """Return `recipe` with the default model: of the sizes from that of `samples` on the first that its mesh splits."""
    named = []
    for size in SIZES[samples > TINY_IMAGES :]:
        name = default_model(samples, recipe.model.image_size or side, recipe.task.name, size)
        model = recipe.model.model_validate({**recipe.model.model_dump(exclude_unset=True), "name": name})
        named.append(recipe.model_copy(update={"model": model}))
        with suppress(UserError):
            plan = named[-1].requested_plans()[0]
            least = (plan.pp or 1) * max(strategy.known_size for strategy in plan.distinct)
            validate(plan.resolve(least), named[-1].config(1), None)
            return named[-1]
    return named[0]  # its plan is refused later


def recipe_for(
    samples: int,
    options: Mapping[str, object] | None = None,
    assignments: Iterable[str] = (),
    *,
    side: int | None = None,
) -> Recipe:
    """Return the recipe that `vitpar train` uses without a recipe file for data of `samples` training images.

    side: of the images, the shorter one in pixels, for which a model is chosen; None for an unknown one.
    options: settings by dotted key. ``data.path`` or the settings of a stream are required.
    assignments: as for ``--set``.

    Raises RecipeError and ModelError.

    Example: ``recipe_for(50_000, {"data.path": "data_shards/mine", "model.name": "vit_tiny_patch4_32"})``
    """
    return with_defaults(read_recipe(None, options, assignments, needs_length=False), samples, side)


def _table_settings(recipe: Recipe, config: ModelConfig, samples: int) -> dict[str, Any]:
    """Return the table's values for `recipe`, by dotted key."""
    row = row_of(recipe.task.name, samples)
    if recipe.task.name in TASKS:
        return _of_task(recipe, row) | _length(recipe, row, samples)
    larger = row.larger if config.large else {}
    settings = {**row.settings, **{key: value for key, value in larger.items() if key != "lr"}}
    if config.image_size <= SMALL_IMAGE:
        settings |= SMALL
    if recipe.stream:
        settings = {key: value for key, value in settings.items() if key not in (*STREAM_CANNOT, "augment.mixup_prob")}
    fields = {f"model.{name}" for name in field_names(type(config.unadapted))}
    settings = {key: value for key, value in settings.items() if not key.startswith("model.") or key in fields}
    if recipe.task.name != CLASSIFY:
        settings = {key: value for key, value in settings.items() if key not in OF_CLASSES}
    rate = _rate(recipe, larger.get("lr", row.lr), row.batch)
    if rate is None:
        del settings["optimizer.weight_decay"]  # the table has that of AdamW
    else:
        settings["optimizer.lr"] = rate
    return settings | _length(recipe, row, samples)


def _of_task(recipe: Recipe, row: DefaultsRow) -> dict[str, Any]:
    """Return the settings of a task of TASKS, by dotted key; those of its optimizer only if the recipe has no other."""
    optimizer, settings = recipe.optimizer, {**row.settings}
    ratio = (optimizer.lr_batch_size or recipe.train.batch_size) / row.batch
    if settings.pop("optimizer.lr_scaling", "linear") == "sqrt":
        ratio = math.sqrt(ratio)
    if settings["optimizer.name"] == "adamw":
        settings["optimizer.lr"] = float(f"{row.lr * ratio:.3g}")
    if "name" in optimizer.model_fields_set and optimizer.name != settings["optimizer.name"]:
        settings = {key: value for key, value in settings.items() if not key.startswith("optimizer.")}
    return settings


def _rate(recipe: Recipe, lr: float, batch: int) -> float | None:
    """Return the learning rate for the recipe's optimizer and batch; None where no rule is known."""
    optimizer = recipe.optimizer
    if optimizer.name == "lamb":
        lr, batch, most = LAMB_LR, LAMB_BATCH, 2 * LAMB_LR
    elif optimizer.name in ("adamw", "adam") or (
        optimizer.name == "muon" and optimizer.adjust_lr_fn == "match_rms_adamw"
    ):
        most = MAX_LR
    else:
        return None
    size = optimizer.lr_batch_size or recipe.train.batch_size
    return float(f"{min(most, lr * math.sqrt(size / batch)):.3g}")


def _length(recipe: Recipe, row: DefaultsRow, samples: int) -> dict[str, Any]:
    """Return the settings of epochs and warm-up that the recipe leaves out."""
    train, schedule = recipe.train, recipe.lr_schedule
    settings: dict[str, Any] = {}
    epochs = train.epochs or row.epochs
    if train.steps is not None:
        epochs = train.steps * train.batch_size / samples
    else:
        settings["train.epochs"] = epochs
    if schedule.warmup is None:
        warmup = min(row.warmup_epochs, MAX_WARMUP * epochs)
        if train.steps is None:
            settings["lr_schedule.warmup"] = f"{warmup:.3g} epochs"
        else:
            settings["lr_schedule.warmup"] = round(warmup * samples / train.batch_size)
    return settings
