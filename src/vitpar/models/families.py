"""The families of models, the configuration of a model by name or from JSON, and what a model consists of."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import textwrap
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from vitpar.errors import ModelError
from vitpar.models.bert.config import BertConfig
from vitpar.models.config import ModelConfig, field_names
from vitpar.models.description import block_index, is_block
from vitpar.models.dino.config import DINOConfig
from vitpar.models.lora import LoRA
from vitpar.models.mae.config import MAEConfig
from vitpar.models.swin.config import SwinConfig
from vitpar.models.t5.config import T5Config
from vitpar.models.vit.config import ViTConfig
from vitpar.text import divisors, nearest, shown

FAMILIES: dict[str, type[ModelConfig]] = {
    family.FAMILY: family for family in (ViTConfig, SwinConfig, MAEConfig, DINOConfig, BertConfig, T5Config)
}
"""Configuration classes by the name of their family. ``vitpar.models.own`` adds those of the user."""
SHIPPED = tuple(name for family in FAMILIES.values() for name in family.PUBLISHED)
"""Names that stand for a published model."""
FIXED = ("name", "num_classes", "channels")
"""Fields of configurations that no recipe sets: the data decide them, or the name itself."""
_FAMILY = "family"
"""Key of the family in JSON; ViT's leave it out."""
_ADAPTERS = "lora"
"""Key of the adapters in JSON."""


def model_config(name: str, **options: Any) -> ModelConfig:
    """Return the configuration of a model by timm's or the hub's name, with `options` replacing its fields.

    Any ViT takes any patch and image size: ``vit_tiny_patch4_32``. The names ``vit_custom``, ``swin_custom``,
    ``mae_custom``, ``bert_custom`` and ``t5_custom`` take everything from `options`. The option `num_classes`, which
    comes from the data, has no effect on models of text.

    Raises ModelError for an unknown name or option, or options that contradict each other.
    """
    family = family_of(name)
    known = field_names(family) - {"name"}
    if "num_classes" not in known:
        options.pop("num_classes", None)
    for option in options:
        if option not in known:
            raise ModelError(
                f"unknown model option '{shown(option)}' of {shown(name)}{nearest(option, known)}: options are "
                f"{', '.join(sorted(known))}"
            )
    return family.named(name, options)


def family_of(name: str) -> type[ModelConfig]:
    """Return the configuration class of the family that knows the model called `name`.

    Raises ModelError for an unknown name.
    """
    for family in FAMILIES.values():
        if family.knows(name):
            return family
    if ".py:" in name:
        raise ModelError(
            f"'{shown(name)}' is a model of your own, which only the command line can name, since its file is run: "
            f"give --model {shown(name)}"
        )
    raise ModelError(
        f"unknown model '{shown(name)}'{nearest(name, SHIPPED)}: vitpar has Vision and Swin Transformers, masked "
        "autoencoders, BERT and T5, such as vit_small_patch16_224, swin_custom, mae_vit_base, bert_base or t5_small"
    )


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `config`, its family unless it is ViT, and its adapters if it has any."""
    if isinstance(config, LoRA):
        adapters = {"rank": config.rank, "alpha": config.alpha, "modules": list(config.modules)}
        return {**config_to_json(config.whole), _ADAPTERS: adapters}
    fields: dict[str, Any] = dataclasses.asdict(config)  # type: ignore[call-overload]
    return fields if config.FAMILY == ViTConfig.FAMILY else {_FAMILY: config.FAMILY, **fields}


def config_from_json(said: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration that `config_to_json` wrote.

    Raises ModelError for an unknown family or field, and for values that are invalid or of another type.
    """
    from pydantic import TypeAdapter, ValidationError

    from vitpar.records import first_wrong

    fields = dict(said)
    if (adapters := fields.pop(_ADAPTERS, None)) is not None:
        return _with_adapters(config_from_json(fields), adapters)
    name = fields.pop(_FAMILY, ViTConfig.FAMILY)
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        if isinstance(name, str) and ".py:" in name:
            raise ModelError(
                f"the model is {shown(name)}, a model of your own: give the file that defines it with "
                "--model FILE.py:NAME"
            )
        raise ModelError(
            f"unknown family of models '{shown(name)}'{nearest(name, FAMILIES)}: use {', '.join(FAMILIES)}"
        )
    known = field_names(family)
    if unknown := fields.keys() - known:
        name = min(unknown)
        raise ModelError(f"unknown model field '{shown(name)}'{nearest(name, known)}")
    try:
        return TypeAdapter(family).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        raise ModelError(first_wrong(error)) from None


def _with_adapters(config: ModelConfig, said: object) -> LoRA:
    """Return `config` with the adapters that `config_to_json` wrote. Raises ModelError for anything else."""
    kinds: dict[str, type | tuple[type, ...]] = {"rank": int, "alpha": (int, float), "modules": list}
    if not isinstance(said, dict) or said.keys() != kinds.keys():
        raise ModelError(f"{_ADAPTERS} of {config.name} must have {', '.join(kinds)}: do not use it")
    wrong = [name for name, kind in kinds.items() if not isinstance(said[name], kind) or isinstance(said[name], bool)]
    if wrong or not all(isinstance(name, str) for name in said["modules"]):
        raise ModelError(f"{_ADAPTERS} of {config.name} has {(wrong or ['modules'])[0]} of another type: do not use it")
    return LoRA(config, tuple(said["modules"]), said["rank"], float(said["alpha"]))


def published(part: str = "") -> list[ModelConfig]:
    """Return the models that have a published name.

    part: name of a family, or part of a model's name, in which `*` and `?` stand for any text and any character.
    """
    every = [(one, name) for one in FAMILIES.values() for name in one.PUBLISHED]
    if part in {one.FAMILY for one, _ in every}:
        wanted = [pair for pair in every if part == pair[0].FAMILY]
    else:
        wanted = [pair for pair in every if fnmatchcase(pair[1], f"*{part.lower()}*")]
    return [family.named(name, {}) for family, name in wanted]


def size(config: ModelConfig) -> dict[str, Any]:
    """Return a model's size, for JSON: tokens and features are those that enter the first and leave the last block.

    Floating-point operations are those of one image's forward, matrix products only; a multiply-add counts as two.
    """
    enter, leave = (config.layers[name].gives for name in (config.layer_names[0], config.layer_names[-2]))
    return {
        "name": config.name,
        "family": config.FAMILY,
        "parameters": config.parameters,
        "forward_flops": config.flops // 3,  # a training step counts as three times the forward
        "tokens": (enter.tokens, leave.tokens),
        "features": (enter.features, leave.features),
        "image_size": config.image_size,
    }


def kinds(config: ModelConfig) -> list[dict[str, Any]]:
    """Return the kinds of a model's layers, which have equal shapes and costs, in order and ready for JSON.

    Each has the names of its layers, and of one layer the size (`size`), what it gives, and the degrees of tensor
    parallelism that divide it, without 1; None for all.
    """
    names: dict[str, list[str]] = {}
    for layer in config.layers.values():
        names.setdefault(layer.kind, []).append(layer.name)
    entries: list[dict[str, Any]] = []
    for kind, layer in config.kinds.items():
        numbers = layer.divisible.values()
        tp = tuple(divisors(math.gcd(*numbers))[1:]) if numbers else None
        entries.append(
            {
                "kind": kind,
                "layers": _ranges(names[kind]),
                "parameters": layer.numel,
                "forward_flops": layer.flops // 3,
                "tokens": layer.gives.tokens,
                "features": layer.gives.features,
                "tp": tp if "1d" in layer.modes else (),
                "modes": layer.modes,
            }
        )
    return entries


def common_tp(config: ModelConfig) -> tuple[int, ...]:
    """Return the degrees of tensor parallelism, without 1, that divide all layers of a model."""
    numbers = [number for layer in config.layers.values() for number in layer.divisible.values()]
    usable = numbers and all("1d" in layer.modes for layer in config.layers.values())
    return tuple(divisors(math.gcd(*numbers))[1:]) if usable else ()


def options(config: ModelConfig) -> dict[str, str]:
    """Return the effects of the fields that recipes may set, by name; empty if their class does not say."""
    effects: dict[str, str] = {}
    for parent in reversed(type(config).__mro__):
        if issubclass(parent, ModelConfig):
            effects |= _docstrings(parent)
    names = [field.name for field in dataclasses.fields(config) if field.name not in FIXED]  # type: ignore[arg-type]
    return {name: effects.get(name, "") for name in names}


def _ranges(names: Collection[str]) -> str:
    """Return names of layers, those of blocks as ranges: `embed`, `blocks.0-3,5`."""
    others, parts = [name for name in names if not is_block(name)], list[list[int]]()
    for index in (block_index(name) for name in names if is_block(name)):
        if parts and parts[-1][-1] + 1 == index:
            parts[-1].append(index)
        else:
            parts.append([index])
    words = ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
    return ", ".join([*others, *([f"blocks.{words}"] if words else [])])


def _docstrings(cls: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class; empty without its source."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    assert isinstance(node, ast.ClassDef)
    docstrings = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings[field.target.id] = " ".join(value.value.split())
    return docstrings
