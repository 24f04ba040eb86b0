"""Summary of a recipe in a few rows: optimizer, learning rate, augmentation, regularisation and precision."""

from __future__ import annotations

from collections.abc import Iterator

from vitpar.models.lora import LoRA
from vitpar.recipe import Recipe
from vitpar.recipe.rates.shapes import Constant, MultiStep, RSqrt, Step
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.strategy.precisions import PRECISION_TYPES
from vitpar.text import count
from vitpar.training.events import RunHeader


def recipe_rows(header: RunHeader) -> Iterator[tuple[str, str]]:
    """Yield names and values of the rows, leaving out features that are off or have their defaults."""
    recipe = header.recipe
    if (images := header.origin.default_images) is not None:
        yield "settings", f"defaults for {images:,} {header.task.SAMPLE}s (docs/defaults.md)"
    yield "optimizer", optimizer_words(recipe)
    yield "lr", lr_words(recipe, header.train_samples)
    if recipe.train.freeze is not None:
        yield "frozen", recipe.train.freeze
    if isinstance(header.config, LoRA):
        lora = recipe.lora
        layers = count(len(header.config.modules), "linear layer")
        trained = "the head" if lora.train is None else lora.train.strip() or "nothing else"
        yield "adapters", f"rank {lora.rank}, alpha {lora.alpha:g} on {layers}; with them trains {trained}"
    if recipe.distill.teacher is not None:
        yield "teacher", teacher_words(recipe)
    if header.task.INPUT == "images":
        yield "augment", augment_words(recipe)
    if recipe.train.image_sizes is not None:
        yield "pixels", f"{recipe.train.image_sizes}, then {header.config.image_size}"
    # Not every family drops paths or features.
    rates = (getattr(header.config, name, 0.0) for name in ("drop_path", "dropout"))
    if words := regularisation_words(recipe, *rates):
        yield "regularize", words
    yield "precision", precision_words(recipe, header.origin.automatic_precision)
    if recipe.track.trackers:
        yield "track", track_words(recipe)
    if words := kernel_words(recipe):
        yield "kernels", words


def optimizer_words(recipe: Recipe) -> str:
    """Return text such as `adamw, weight decay 0.05, betas 0.9 and 0.95, gradients clipped at norm 1`."""
    optimizer, usual = recipe.optimizer, OptimizerSection(name=recipe.optimizer.name)
    end = optimizer.weight_decay_end
    words = [optimizer.name, f"weight decay {optimizer.weight_decay:g}{'' if end is None else f' to {end:g}'}"]
    if optimizer.layer_decay != usual.layer_decay:
        words.append(f"layer decay {optimizer.layer_decay:g}")
    if optimizer.betas != usual.betas:
        words.append(f"betas {optimizer.betas[0]:g} and {optimizer.betas[1]:g}")
    if optimizer.momentum:
        words.append(f"momentum {optimizer.momentum:g}")
    if recipe.train.clip_grad_norm:
        by_part = " of each part" if recipe.train.clip_by_part else ""
        words.append(f"gradients clipped at norm {recipe.train.clip_grad_norm:g}{by_part}")
    return ", ".join(words)


def teacher_words(recipe: Recipe) -> str:
    """Return text such as `runs/teacher under fsdp4: soft targets, alpha 0.5, tau 3`."""
    distill = recipe.distill
    tau = "" if distill.kind == "hard" else f", tau {distill.tau:g}"
    return f"{distill.teacher} under {distill.plan}: {distill.kind} targets, alpha {distill.alpha:g}{tau}"


def lr_words(recipe: Recipe, samples: int) -> str:
    """Return text such as `0.001 after 50 steps of warm-up, cosine to 0`, for a number of training samples."""
    rate = recipe.learning_rate(samples)
    steps, least = rate.warmup_steps, recipe.lr_schedule.min_lr
    warmup = f"after {count(steps, 'step')} of warm-up" if steps else "from the first step"
    end = "" if isinstance(rate.shape, Constant | Step | MultiStep | RSqrt) and not least else f" to {least:g}"
    return f"{rate.peak:g} {warmup}, {recipe.lr_schedule.shape}{end}"


def augment_words(recipe: Recipe) -> str:
    """Return text such as `crop 0.08-1, flip 0.5, rand-m9-n2, erasing 0.25, mixup 0.8 or CutMix 1, 3 repeats`."""
    data, augment = recipe.data, recipe.augment
    crop = "crop {:g}-{:g}".format(*data.crop_scale)
    if data.crop_padding is not None:
        crop = f"crop with padding {data.crop_padding}"
    jitter = augment.color_jitter if isinstance(augment.color_jitter, tuple) else (augment.color_jitter,)
    mixed = [f"{name} {alpha:g}" for name, alpha in (("mixup", augment.mixup), ("CutMix", augment.cutmix)) if alpha]
    words = [
        crop,
        f"flip {data.flip:g}" if data.flip else "no flip",
        augment.policy,
        f"colour jitter {' '.join(f'{part:g}' for part in jitter)}" if any(jitter) else None,
        f"erasing {augment.random_erasing:g}" if augment.random_erasing else None,
        " or ".join(mixed) + (f" in {augment.mixup_prob:.0%}" if mixed and augment.mixup_prob != 1 else ""),
        f"{augment.repeats} repeats" if augment.repeats > 1 else None,
    ]
    return ", ".join(filter(None, words))


def regularisation_words(recipe: Recipe, drop_path: float, dropout: float) -> str:
    """Return text such as `label smoothing 0.1, drop-path 0.1, EMA 0.9999`; empty if all are off."""
    parts = {
        "label smoothing": recipe.train.label_smoothing,
        "drop-path": drop_path,
        "dropout": dropout,
        "EMA": recipe.train.ema_decay or 0,
    }
    course = recipe.train.drop_path_schedule
    courses = {"drop-path": "" if course == "constant" else f" {course}"}
    return ", ".join(f"{name} {value:g}{courses.get(name, '')}" for name, value in parts.items() if value)


def precision_words(recipe: Recipe, automatic: bool) -> str:
    """Return text such as `bf16 (auto): compute in bfloat16, parameters in float32`.

    automatic: whether the precision was chosen automatically.
    """
    precision = PRECISION_TYPES[recipe.train.precision]
    compute, parameters = precision.compute.name, precision.parameters.name
    words = f"{recipe.train.precision}{' (auto)' * automatic}"
    return words if compute == parameters else f"{words}: compute in {compute}, parameters in {parameters}"


def kernel_words(recipe: Recipe) -> str:
    """Return text such as `blocks compiled, attention math`; empty if all is chosen automatically."""
    train = recipe.train
    words = [] if train.compile is None else ["blocks compiled" if train.compile else "blocks not compiled"]
    if train.attention != "auto":
        words.append(f"attention {train.attention}")
    return ", ".join(words)


def track_words(recipe: Recipe) -> str:
    """Return text such as `tensorboard, wandb (offline)`."""
    track = recipe.track
    return ", ".join(f"{name} ({track.wandb_mode})" if name == "wandb" else name for name in track.trackers)
