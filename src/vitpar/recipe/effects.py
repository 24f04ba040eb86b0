"""Settings without effect: what each setting needs to have one, in one table, and the settings that commands use.

`vitpar train` warns of settings without effect and leaves them out of the run's recipe. Settings that contradict each
other are refused (``vitpar.recipe.recipe``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from vitpar.recipe.sections import Section
from vitpar.recipe.sections.input import TEXT, AugmentSection
from vitpar.recipe.sections.training import DistillSection, LossScaleSection, OptimizerSection
from vitpar.strategy import Plan
from vitpar.strategy.execution import Rules
from vitpar.strategy.layout import sharding_axes, shards_as_fsdp

R = TypeVar("R", bound=Section)


def _keys(**settings: str) -> tuple[str, ...]:
    """Return dotted keys. settings: names of settings, separated by spaces, by section."""
    return tuple(f"{section}.{name}" for section, names in settings.items() for name in names.split())


@dataclass(frozen=True)
class Need:
    """Settings that have an effect only together with certain others."""

    keys: tuple[str, ...]
    """Dotted keys of a recipe."""
    what: str
    """Their needs, in words."""
    met: Callable[[Any], bool]
    """Function of a recipe: whether they have an effect."""


def _need(what: str, **settings: str) -> Need:
    """Return the need of settings for another one.

    what: its key, if it may have any value but 0, false and unset, or key and values, separated by ` or `.
    """
    key, _, values = what.partition(" ")
    section, _, name = key.partition(".")

    def met(recipe: Any) -> bool:
        value = getattr(getattr(recipe, section), name)
        return value in values.split(" or ") if values else bool(value)

    return Need(_keys(**settings), what, met)


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

NEEDS: tuple[Need, ...] = (
    _need("optimizer.name adamw or adam or lion or lamb or muon", optimizer="betas"),
    _need("optimizer.name adamw or adam or lamb or muon", optimizer="eps"),
    _need("optimizer.name sgd or lars or muon", optimizer="momentum nesterov"),
    _need("optimizer.name lars", optimizer="trust_coefficient"),
    _need("optimizer.name muon", optimizer="ns_steps adjust_lr_fn"),
    _need("optimizer.momentum", optimizer="nesterov"),
    _need("optimizer.lr_batch_size", optimizer="lr_scaling"),
    Need(
        ("lr_schedule.min_lr",),
        "an lr_schedule.shape other than constant",
        lambda recipe: recipe.lr_schedule.shape.strip() != "constant",
    ),
    Need(
        _keys(lr_schedule="warmup_lr after_warmup"),
        "lr_schedule.warmup",
        lambda recipe: bool(recipe.lr_schedule.warmup and recipe.lr_schedule.warmup.number),
    ),
    _need("train.ema_decay", train="ema_warmup ema_decay_end"),
    _need("train.clip_grad_norm", train="clip_by_part"),
    Need(("train.activation_memory_budget",), "train.compile", lambda recipe: recipe.train.compile is not False),
    _need("train.precision fp8", train="fp8_min_features fp8_fast_accum"),
    _need("train.precision fp16", loss_scale=" ".join(LossScaleSection.model_fields)),
    _need("loss_scale.dynamic", loss_scale="min_scale max_scale growth_factor backoff_factor"),
    Need(
        ("faults.non_finite",),
        "another train.precision than fp16, whose [loss_scale] skips such updates",
        lambda recipe: recipe.train.precision != "fp16",
    ),
    _need("faults.non_finite skip", faults="max_skipped"),
    Need(
        _keys(data="crop_scale crop_ratio"),
        "crops without data.crop_padding",
        lambda recipe: recipe.data.crop_padding is None,
    ),
    _need("data.cache memory", data="cache_gb"),
    Need(OF_IMAGES, "a task of images", lambda recipe: recipe.task.name not in TEXT),
    _need("lora.rank", lora="alpha targets train weights"),
    _need("distill.teacher", distill="kind alpha tau plan"),
    _need("distill.kind soft or logits", distill="tau"),
    Need(
        _keys(track="project name"),
        "wandb or trackio in track.trackers",
        lambda recipe: bool({"wandb", "trackio"} & {*recipe.track.trackers}),
    ),
    Need(("track.wandb_mode",), "wandb in track.trackers", lambda recipe: "wandb" in recipe.track.trackers),
)
"""All settings that have an effect only together with certain others of the recipe."""


def idle_settings(recipe: Any, plan: Plan | None = None) -> dict[str, str]:
    """Return the settings that have no effect in `recipe`, with what each needs.

    plan: of the training, for the settings of [communication]; None to leave these out.
    """
    idle = {key: need.what for need in NEEDS if not need.met(recipe) for key in need.keys}
    if plan is None:
        return idle
    rules, strategies = Rules.under(plan, recipe.train.precision), plan.distinct
    if not any(strategy.has("dp") and not rules.wraps(strategy) for strategy in strategies):
        idle["communication.bucket_cap_mb"] = "layers with dp where nothing is sharded or offloaded"
    if not any(sharding_axes(strategy) for strategy in strategies):
        idle["communication.prefetch"] = "layers with fsdp, +2d, +2.5d, +3d, +zero1 or +zero2"
    if not any(map(shards_as_fsdp, strategies)):
        names = _keys(communication="reshard_after_forward reduce_every_microbatch")
        idle |= dict.fromkeys(names, "layers with fsdp, +2d, +2.5d or +3d")
    return idle


def without_idle(recipe: R, plan: Plan) -> tuple[R, list[str]]:
    """Return `recipe`, whose precision is resolved, without settings that have no effect, and a warning for each."""
    warnings, sections = list[str](), dict[str, Section]()
    for key, needed in idle_settings(recipe, plan).items():
        name, _, setting = key.partition(".")
        section = sections.get(name) or getattr(recipe, name)
        value, usual = getattr(section, setting), type(section).model_fields[setting].default
        if value != usual:
            warnings.append(f"{key} {value} does nothing: it needs {needed}")
            sections[name] = section.model_copy(update={setting: usual})
    return recipe.model_copy(update=sections), warnings


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
    train=f"batch_size {_PRECISION} reduce_dtype label_smoothing clip_grad_norm clip_by_part ema_decay compile "
    "attention activation_memory_budget freeze",
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
        "clip_grad_norm clip_by_part ema_decay ema_warmup freeze",
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
