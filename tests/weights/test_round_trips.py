"""Weights that go to another library's names and back: every published name, and small models with every part."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.mae_models import mae
from helpers.modern_vits import PARTS, modern_config
from helpers.text_models import V1_1, bert, t5
from vitpar import model_config
from vitpar.errors import DataError
from vitpar.models.config import ModelConfig, field_names
from vitpar.models.convert import Exported
from vitpar.models.families import SHIPPED
from vitpar.weights.foreign import FAMILIES, recognised

FORMATS = ("timm", "transformers")
SWIN: dict[str, Any] = {"patch_size": 2, "image_size": 24, "window_size": 3, "embed_dim": 24, "num_heads": (2, 4)}
SMALL: dict[str, ModelConfig] = {
    **{name: modern_config(name) for name in PARTS},
    "vit": modern_config("dinov2", layer_scale=None, activation="gelu_tanh", qkv_bias="none"),
    "deit": modern_config("dinov2", layer_scale=None, distillation=True),
    "dinov2 giant": modern_config("dinov2_giant_reg4", mlp_hidden_dim=128),
    "swin": model_config("swin_custom", **SWIN, depths=(1, 2), num_classes=5, mlp_ratio=2.5),
    "mae": mae(),
    "bert": bert(token_types=3),
    "t5": t5(depth=3, decoder_depth=1),
    "t5 v1.1": t5(**V1_1),
}
UNSEEN = ("name", "init", "layer_scale", "tokens", "decoder_tokens")
"""Fields that no file of a library shows."""
ONLY_READ = {"vit5", "vit_22b", "parallel"}
"""Models that no library's format can hold."""


def exported(config: ModelConfig, format_name: str) -> Exported | None:
    """Return the model as the library has it; None if it has none."""
    try:
        made = FAMILIES[config.FAMILY].exported(config, format_name)
    except DataError:
        return None
    tensors = {**made.tensors, **made.classifier}
    return made if {name for tensor in tensors.values() for name in tensor.names} == config.shapes.keys() else None


def back(config: ModelConfig, made: Exported, values: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return what the import makes of the export of `values`: the configuration and the parameters."""
    tensors = {**made.tensors, **made.classifier}
    theirs = {name: tensor.make(*(values[one] for one in tensor.names)) for name, tensor in tensors.items()}
    family, found = recognised("x", {name: tuple(tensor.shape) for name, tensor in theirs.items()})
    again = family.infer_config("x", found, {**family.said(made.config), **beside(config)})
    parts = family.parts(found, again)
    return again, {name: part.make(*(theirs[one] for one in part.names)) for name, part in parts.items()}


def beside(config: ModelConfig) -> dict[str, Any]:
    """Return what other files say: the size of images, and the heads of an autoencoder under its authors' names."""
    fields = {"image_size": config.image_size} if config.image_size else {}
    heads = ("num_heads", "decoder_num_heads") if config.FAMILY == "mae" else ()
    return fields | {name: getattr(config, name) for name in heads}


def assert_round_trips(config: ModelConfig, values: Mapping[str, Tensor]) -> int:
    """Check each format that holds the model, and return their number."""
    count = 0
    for format_name in FORMATS:
        if (made := exported(config, format_name)) is None:
            continue
        again, parameters = back(config, made, values)
        assert parameters.keys() == values.keys(), format_name
        for name, value in values.items():
            same = parameters[name].shape == value.shape if value.is_meta else torch.equal(parameters[name], value)
            assert same, f"{name} in {format_name}"
        unseen = {field: getattr(config, field) for field in field_names(type(config)) & {*UNSEEN}}
        assert replace(again, **unseen) == config, format_name  # type: ignore[type-var]
        count += 1
    return count


@pytest.mark.parametrize("name", SMALL)
def test_values_come_back(name: str) -> None:
    config, draws = SMALL[name], torch.Generator().manual_seed(0)
    values = {one: torch.randn(config.shape(one), generator=draws) for one in config.shapes}
    assert (assert_round_trips(config, values) > 0) is (name not in ONLY_READ)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_names_come_back(family: str) -> None:
    """Names and shapes of every published model, in each format that holds it; no memory is allocated."""
    configs = [config for name in SHIPPED if family == (config := model_config(name)).FAMILY]
    assert configs
    for config in configs:
        values = {name: torch.empty(config.shape(name), device="meta") for name in config.shapes}
        held = assert_round_trips(config, values)
        assert (held == 0) is config.name.startswith(("vit5", "vit_22b"))


def test_templates_of_a_row_have_the_same_numbers_and_ends() -> None:
    for family in FAMILIES.values():
        for library in family.libraries.values():
            for row in library.rows:
                assert len({tuple(re.findall(r"\{\}|\*", name)) for name in (*row.ours, *row.theirs)}) == 1, row.ours
