"""Reference of all settings, which `vitpar settings` prints, and their names in other tools, which errors suggest."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen

from vitpar.errors import RecipeError
from vitpar.intervals import Interval
from vitpar.limits import MAX_COUNT
from vitpar.recipe.recipe import Recipe
from vitpar.text import nearest, shown

_NAMES_ELSEWHERE = {
    "task.options.bce": "bce_loss",
    "task.options.bce_positive_weight": "bce_pos_weight",
    "task.options.bce_sum": "bce_sum",
    "task.options.bce_target_threshold": "bce_target_thresh",
    "model.depth": "num_layers",
    "model.drop_path": "drop_path_rate",
    "model.image_size": "img_size",
    "model.mlp_hidden_dim": "mlp_ratio",
    "model.num_reg_tokens": "reg_tokens",
    "model.weights": "pretrained",
    "data.crop_padding": "padding",
    "data.crop_ratio": "ratio",
    "data.crop_scale": "scale",
    "data.flip": "hflip",
    "data.path": "data_dir",
    "data.workers": "num_workers",
    "augment.policy": "aa auto_augment",
    "augment.random_erasing": "random_erase reprob",
    "optimizer.betas": "opt_betas",
    "optimizer.eps": "opt_eps",
    "optimizer.layer_decay": "layerwise_decay",
    "optimizer.lr": "learning_rate lr_base",
    "optimizer.lr_batch_size": "lr_base_size",
    "optimizer.lr_scaling": "lr_base_scale",
    "optimizer.momentum": "momentum_beta",
    "optimizer.name": "opt",
    "optimizer.weight_decay": "start_weight_decay wd",
    "optimizer.weight_decay_end": "end_weight_decay final_weight_decay",
    "lr_schedule.after_warmup": "warmup_prefix",
    "lr_schedule.min_lr": "min_lr",
    "lr_schedule.per_epoch": "sched_on_updates",
    "lr_schedule.shape": "lr_scheduler_type sched",
    "lr_schedule.warmup": "warmup_epochs warmup_ratio warmup_steps",
    "train.batch_size": "bs global_batch_size",
    "train.clip_grad_norm": "clip_grad gradient_clip_val max_grad_norm",
    "train.compile": "torchcompile",
    "train.ema_decay": "model_ema model_ema_decay",
    "train.epochs": "max_epochs num_epochs num_train_epochs",
    "train.label_smoothing": "smoothing",
    "train.log_every": "log_interval",
    "train.precision": "amp dtype mixed_precision",
    "train.steps": "max_steps",
    "checkpoint.every": "every_epochs every_minutes every_samples every_steps save_steps",
    "parallel.microbatches": "accumulate_grad_batches grad_accum_steps gradient_accumulation_steps num_microbatches",
    "track.name": "run_name",
    "track.project": "project_name",
    "track.trackers": "report_to",
}
"""Names of vitpar's settings elsewhere: options of timm and Megatron, and arguments of torchvision, Lightning and
transformers' Trainer."""
OTHER_NAMES = {name: key for key, names in _NAMES_ELSEWHERE.items() for name in names.split()}
"""vitpar's key by the last part of the name elsewhere."""
ABSENT = {"num_classes": "the number of classes comes from the data"}
"""Why vitpar has no such setting, by its name elsewhere."""


@dataclass(frozen=True)
class Setting:
    """One key of a recipe."""

    key: str
    """Dotted, such as train.batch_size."""
    kind: str
    """Type, choices and range, in words."""
    default: str
    """Default as TOML; "unset" where there is none."""
    effect: str
    """Effect of the setting, with its unit."""


def settings() -> Iterator[Setting]:
    """Yield every setting, in the order of the sections."""
    for section, field in Recipe.model_fields.items():
        for name, setting in field.annotation.model_fields.items():  # type: ignore[union-attr]
            effect = " ".join((setting.description or "").split())
            kind = _type(setting.annotation) + _range(setting.metadata)
            default = str(setting.default) if isinstance(setting.default, Interval) else setting.default
            if isinstance(default, float) and 0 < default < 1e-3:
                written = f"{default:g}"
            else:
                written = "unset" if default is None else json.dumps(default)
            yield Setting(f"{section}.{name}", kind, written, effect)


def find(key: str) -> list[Setting]:
    """Return the settings that `key` names. Raises RecipeError.

    key: dotted key of a setting, a section for all of its settings, or the last part of a key here or in other tools.
    """
    every = list(settings())
    matching = [one for one in every if key == one.key.partition(".")[0]]
    if not matching:
        key = OTHER_NAMES.get(key.rpartition(".")[2], key)
    matching = matching or [one for one in every if key in (one.key, one.key.partition(".")[2])]
    if not matching:
        names = {name for one in every for name in (one.key, *one.key.split("."))}
        raise RecipeError(f"unknown setting '{shown(key)}'{nearest(key, names)}: `vitpar settings` lists all")
    return matching


def about(section: str) -> str:
    """Return the docstring of a section, in one paragraph."""
    return " ".join((Recipe.model_fields[section].annotation.__doc__ or "").split())


_NAMES = {Interval: "interval", str: "string", int: "integer", float: "number", bool: "true or false"}
"""Name of each type for users."""


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_type(one) for one in arguments if one is not NoneType)
    if origin is Literal:
        words = [json.dumps(one) for one in arguments]
        return f"{', '.join(words[:-1])} or {words[-1]}"
    if origin is tuple:
        if get_origin(arguments[0]) is Literal:
            return f"list of {_type(arguments[0])}"
        return f"list of {_type(arguments[0])}s" if Ellipsis in arguments else f"{len(arguments)} numbers"
    if origin is dict:
        return "table"
    return _NAMES[annotation]


def _range(metadata: list[Any]) -> str:
    """Return the range in words, without bounds that only guard against nonsense."""
    words = ""
    for bound in metadata:
        match bound:
            case Ge(ge=least):
                words += f" from {least}"
            case Gt(gt=least):
                words += f" above {least}"
            case Le(le=most) if isinstance(most, int | float) and most < min(MAX_COUNT, 10**6):
                words += f" to {most}"
            case Lt(lt=most) if isinstance(most, int | float) and most < 10**6:
                words += f" below {most}"
            case MaxLen(max_length=most):
                words += f", {most} at most"
    return words
