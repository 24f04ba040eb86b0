"""The families of models, and the configuration of a model by name or from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vitpar.errors import ModelError
from vitpar.models.bert.config import BertConfig
from vitpar.models.config import ModelConfig, field_names
from vitpar.models.dino.config import DINOConfig
from vitpar.models.lora import LoRA
from vitpar.models.mae.config import MAEConfig
from vitpar.models.swin.config import SwinConfig
from vitpar.models.t5.config import T5Config
from vitpar.models.vit.config import ViTConfig
from vitpar.text import nearest, shown

FAMILIES: dict[str, type[ModelConfig]] = {
    family.FAMILY: family for family in (ViTConfig, SwinConfig, MAEConfig, DINOConfig, BertConfig, T5Config)
}
"""Configuration classes by the name of their family. ``vitpar.models.own`` adds those of the user."""
SHIPPED = tuple(name for family in FAMILIES.values() for name in family.published())
"""Names that stand for a published model."""
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
    fields: dict[str, Any] = asdict(config)  # type: ignore[call-overload]
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
