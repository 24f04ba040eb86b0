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
    course = recipe.train.drop_path_schedule
    rates = {
        "label smoothing": (recipe.train.label_smoothing, ""),
        "drop-path": (getattr(header.config, "drop_path", 0.0), "" if course == "constant" else f" {course}"),
        "dropout": (getattr(header.config, "dropout", 0.0), ""),
        "EMA": (recipe.train.ema_decay, ""),
    }
    if words := [f"{name} {rate:g}{how}" for name, (rate, how) in rates.items() if rate]:
        yield "regularize", ", ".join(words)
    precision = PRECISION_TYPES[recipe.train.precision]
    compute, parameters = precision.compute.name, precision.parameters.name
    types = "" if compute == parameters else f": compute in {compute}, parameters in {parameters}"
    yield "precision", f"{recipe.train.precision}{' (auto)' * header.origin.automatic_precision}{types}"
    if trackers := recipe.track.trackers:
        wandb = f"wandb ({recipe.track.wandb_mode})"
        yield "track", ", ".join(wandb if name == "wandb" else name for name in trackers)
    compiled, attention = recipe.train.compile, recipe.train.attention
    kernels = [] if compiled is None else [f"blocks {'not ' * (not compiled)}compiled"]
    kernels += [] if attention == "auto" else [f"attention {attention}"]
    if kernels:
        yield "kernels", ", ".join(kernels)


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
