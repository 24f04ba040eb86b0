"""Conditions under which settings have an effect: the source of refusals and of what a written recipe leaves out.

Rows about the recipe alone are applied when it is read, and again once its precision is known. Rows about a plan
(``vitpar.strategy.support.COMMUNICATION``) are applied when the plan is chosen, rows about a command to ``--set``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitpar.errors import RecipeError
from vitpar.strategy.execution import REDUCE_DTYPES
from vitpar.strategy.support import Effect, refuse_idle
from vitpar.training.optim.loss_scale import LossScaleSection
from vitpar.training.recipe.sections.input import CLASSIFY, TEXT, AugmentSection
from vitpar.training.recipe.sections.training import DistillSection, OptimizerSection

if TYPE_CHECKING:
    from vitpar.training.recipe.recipe import Recipe


def _keys(**settings: str) -> tuple[str, ...]:
    """Return dotted keys.

    settings: names of settings, separated by spaces, by section.
    """
    return tuple(f"{section}.{name}" for section, names in settings.items() for name in names.split())


def _of_optimizers(settings: str, *optimizers: str) -> Effect[Recipe]:
    return Effect(
        _keys(optimizer=settings),
        lambda recipe: recipe.optimizer.name in optimizers,
        "{key} is {value!r}, which {case.optimizer.name} does not use: leave it out",
    )


VARIANTS: tuple[Effect[Recipe], ...] = (
    _of_optimizers("betas", "adamw", "adam", "lion", "lamb", "muon"),
    _of_optimizers("eps", "adamw", "adam", "lamb", "muon"),
    _of_optimizers("momentum nesterov", "sgd", "lars", "muon"),
    _of_optimizers("trust_coefficient", "lars"),
    _of_optimizers("ns_steps adjust_lr_fn", "muon"),
    Effect(
        _keys(loss_scale="min_scale max_scale growth_factor backoff_factor"),
        lambda recipe: recipe.loss_scale.dynamic,
        "{key} is {value}, which a constant scale does not use: leave it out",
    ),
    Effect(
        _keys(data="crop_scale crop_ratio"),
        lambda recipe: recipe.data.crop_padding is None,
        "{key} is {value}, which a crop with data.crop_padding does not use: keep one of the two",
    ),
)
"""Settings of one kind of optimizer, loss scale or crop.

A written recipe leaves them out for the other kinds. So it can be read with another `optimizer.name`, which brings its
own defaults.
"""

STREAM_CANNOT = _keys(augment="repeats mixup cutmix", data="shuffle_window cache")
"""Settings that a stream does not support."""

_DISTILLATION = " ".join(DistillSection.model_fields)
OF_CLASSES = _keys(train="label_smoothing", augment="mixup cutmix mixup_prob mixup_switch_prob", distill=_DISTILLATION)
"""Settings of classification. Another task drops those of a recipe file, and has no defaults for them."""

OF_IMAGES = _keys(
    augment=" ".join(AugmentSection.model_fields),
    data="crop_scale crop_ratio crop_padding flip crop_pct crop_mode interpolation mean std decode cache cache_gb "
    "bad_sample",
    train="label_smoothing",
    distill=_DISTILLATION,
)
"""Settings of images, which tasks of text do not use."""

EFFECTS: tuple[Effect[Recipe], ...] = (
    Effect(
        ("lr_schedule.min_lr",),
        lambda recipe: recipe.lr_schedule.shape.strip() != "constant",
        "{key} is {value}, which a constant learning rate never reaches: leave it out, or set lr_schedule.shape",
    ),
    Effect(
        ("optimizer.lr_scaling",),
        lambda recipe: recipe.optimizer.lr_batch_size is not None,
        "{key} is {value!r}, which does nothing without optimizer.lr_batch_size: set both or neither",
    ),
    Effect(
        ("train.ema_warmup",),
        lambda recipe: recipe.train.ema_decay is not None,
        "{key} is true, which does nothing without train.ema_decay: set both or neither",
    ),
    Effect(
        ("train.activation_memory_budget",),
        lambda recipe: bool(recipe.train.compile),
        "{key} is {value}, which applies only to compiled blocks: set train.compile to true, or use +ckpt in the "
        "strategy",
    ),
    Effect(
        _keys(lora="alpha targets train weights"),
        lambda recipe: recipe.lora.rank is not None,
        "{key} is {value!r}, which does nothing without lora.rank: set both or neither",
    ),
    Effect(
        ("train.reduce_dtype",),
        # Automatic precision may become bf16. If it becomes fp32, the setting is checked again.
        lambda recipe: recipe.train.precision in ("auto", *REDUCE_DTYPES),
        "{key} is '{value}', which does nothing with train.precision '{case.train.precision}': leave it out, or set "
        "train.precision to bf16, fp16 or fp8",
    ),
    Effect(
        _keys(train="fp8_min_features fp8_fast_accum"),
        lambda recipe: recipe.train.precision == "fp8",
        "{key} is {value!r}, which does nothing with train.precision '{case.train.precision}': leave it out, or set "
        "train.precision to fp8",
    ),
    Effect(
        _keys(loss_scale=" ".join(LossScaleSection.model_fields)),
        lambda recipe: recipe.train.precision == "fp16",
        "{key} is {value}, which does nothing with train.precision '{case.train.precision}': leave it out, or set "
        "train.precision to fp16",
    ),
    *VARIANTS,
    Effect(
        ("optimizer.nesterov",),
        lambda recipe: recipe.optimizer.momentum > 0,
        "{key} is true but optimizer.momentum is 0: set optimizer.momentum, or nesterov to false",
    ),
    Effect(
        ("optimizer.implementation",),
        lambda recipe: (
            recipe.optimizer.name in ("adamw", "adam", "sgd") or recipe.optimizer.implementation == "foreach"
        ),
        "{key} is '{value}', which {case.optimizer.name} does not support: use 'foreach' or 'auto'",
    ),
    Effect(
        ("optimizer.implementation",),
        lambda recipe: recipe.optimizer.name == "adamw" or recipe.optimizer.implementation != "triton",
        "{key} is '{value}', which {case.optimizer.name} does not support: use 'fused' or 'auto'",
    ),
    Effect(
        ("faults.non_finite",),
        lambda recipe: recipe.train.precision != "fp16",
        "{key} is '{value}', which train.precision fp16 always does through [loss_scale]: leave it out",
    ),
    Effect(
        ("faults.max_skipped",),
        lambda recipe: recipe.faults.non_finite == "skip",
        "{key} is {value}, but faults.non_finite 'stop' skips nothing: leave it out, or set faults.non_finite to skip",
    ),
    Effect(
        ("data.cache_gb",),
        lambda recipe: recipe.data.cache == "memory",
        "{key} is {value}, which does nothing with data.cache '{case.data.cache}': leave it out, or set data.cache to "
        "memory",
    ),
    Effect(
        ("data.decode",),
        lambda recipe: recipe.data.cache == "none" and recipe.data.crop_padding is None,
        "{key} is '{value}', which needs data.cache none and no data.crop_padding: leave it out, or change these",
    ),
    Effect(
        ("data.bad_sample",),
        lambda recipe: recipe.data.cache != "device",
        "{key} is '{value}', but data.cache 'device' decodes all images at the start and stops at a bad one: leave it "
        "out, or set data.cache to memory",
    ),
    Effect(
        STREAM_CANNOT,
        lambda recipe: not recipe.stream,
        "{key} is {value}, which a stream does not support: leave it out, or index the shards",
    ),
    Effect(
        OF_IMAGES,
        lambda recipe: recipe.task.name not in TEXT,
        "{key} is {value!r}, which task '{case.task.name}' does not use: leave it out",
    ),
    Effect(
        ("distill.teacher",),
        lambda recipe: recipe.task.name == CLASSIFY,
        "{key} is '{value}', but task '{case.task.name}' has no classes to learn from a teacher: leave it out, or use "
        "task classify",
    ),
    Effect(
        _keys(distill="kind alpha tau plan"),
        lambda recipe: recipe.distill.teacher is not None,
        "{key} is {value!r}, which does nothing without a teacher: set distill.teacher, or leave it out",
    ),
    Effect(
        ("distill.tau",),
        lambda recipe: recipe.distill.kind != "hard",
        "{key} is {value}, which distill.kind 'hard' does not use: leave it out, or set distill.kind to soft",
    ),
    Effect(
        _keys(track="project name"),
        lambda recipe: bool({"wandb", "trackio"} & set(recipe.track.trackers)),
        "{key} is '{value}', which only wandb and trackio use: leave it out, or name one of them in track.trackers",
    ),
    Effect(
        ("track.wandb_mode",),
        lambda recipe: "wandb" in recipe.track.trackers,
        "{key} is '{value}', which does nothing without W&B: leave it out, or name wandb in track.trackers",
    ),
)
"""All settings that have an effect only together with certain others."""


def refuse_without_effect(recipe: Recipe) -> None:
    """Raise RecipeError for the first setting that differs from its default but has no effect in `recipe`."""
    given = {
        f"{section}.{name}": value
        for section, settings in recipe
        for name, value in settings
        if value != type(settings).model_fields[name].default
    }
    refuse_idle(EFFECTS, recipe, given, RecipeError)


_LORA = "rank alpha targets train"
_PLANNED = _keys(
    task="…",
    model="…",
    lora=_LORA,
    distill="…",
    optimizer="name momentum",
    train="batch_size precision fp8_min_features ema_decay freeze",
)
_LENGTH = _keys(train="epochs steps", data="path", stream="…")
_PRECISION = "precision fp8_min_features fp8_fast_accum"
_BENCHED = _keys(
    task="…",
    model="…",
    lora=_LORA,
    parallel="…",
    communication="…",
    loss_scale="…",
    distill="…",
    optimizer="name implementation layer_decay momentum nesterov ns_steps",
    train=f"batch_size {_PRECISION} reduce_dtype label_smoothing clip_grad_norm ema_decay compile attention "
    "activation_memory_budget freeze",
    faults="non_finite",
)
_OUTPUTS = _keys(
    task="options", data="crop_pct crop_mode interpolation mean std workers", train=f"{_PRECISION} compile attention"
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "a plan": _PLANNED + _LENGTH + _keys(parallel="…", data="decode cache"),
    "a search": _PLANNED + _LENGTH + _keys(train="compile", data="decode cache"),
    "a prediction of scaling": _PLANNED + _keys(train="compile"),
    "a prediction of scaling and cost": _PLANNED + _LENGTH + _keys(train="compile"),
    "a profile": _keys(task="…", model="…", data="path", lora=_LORA, train=f"{_PRECISION} compile attention"),
    "a validation": _BENCHED + _keys(data="path"),
    "an import": _keys(model="…"),
    "a check": _keys(
        task="…",
        model="…",
        lora=_LORA,
        parallel="…",
        communication="…",
        distill="…",
        optimizer=" ".join(name for name in OptimizerSection.model_fields if name != "weight_decay_end"),
        train=f"batch_size seed {_PRECISION} reduce_dtype label_smoothing compile attention activation_memory_budget "
        "clip_grad_norm ema_decay ema_warmup freeze",
        augment="repeats mixup cutmix mixup_prob mixup_switch_prob",
    ),
    "an evaluation": _keys(
        task="options",
        data="path crop_pct crop_mode interpolation mean std workers bad_sample",
        stream="train val samples val_samples classes label allow_pipe",
        train=f"batch_size {_PRECISION} compile attention",
    ),
    "a prediction": _OUTPUTS,
    "an extraction of features": _OUTPUTS,
    "a benchmark without data": _BENCHED,
    "a benchmark": _BENCHED
    + _keys(
        augment="…",
        stream="…",
        train="seed",
        data="path crop_scale crop_ratio crop_padding flip interpolation mean std shuffle_window shuffle_block workers "
        "decode cache cache_gb bad_sample",
    ),
}
"""Settings that each kind of command uses. ``section.…`` stands for all of a section; a training uses all settings."""
