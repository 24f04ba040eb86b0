"""Description of models of every family compared with their modules: parameters, tokens, shapes, operations."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers.mae_models import mae
from helpers.plans import TINY_SWIN
from helpers.text_models import V1_1, bert, sample, t5
from vitpar.errors import ModelError
from vitpar.models import ViTConfig, model_config
from vitpar.models.config import ModelConfig
from vitpar.models.families import FAMILIES, config_from_json, config_to_json
from vitpar.models.initial import initialise
from vitpar.models.layers import Layer, LayeredModel

SMALL = model_config(
    "vit_custom", patch_size=4, image_size=12, embed_dim=24, depth=2, num_heads=3, mlp_hidden_dim=40, num_classes=5
)
VALUES: dict[str, tuple[Any, ...]] = {
    "pool": ("cls", "avg"),
    "num_reg_tokens": (0, 2),
    "distillation": (False, True),
    "representation_size": (None, 10),
    "position": ("learned", "sincos2d"),
    "qk_norm": (False, True),
    "layer_scale": (None, 0.1),
}
SIZES: tuple[dict[str, Any], ...] = (
    {"channels": 1, "patch_size": 3, "num_classes": 1},
    {"image_size": 4},
    {"embed_dim": 16, "num_heads": 1, "mlp_hidden_dim": 7, "depth": 1},
    {"drop_path": 0.3, "dropout": 0.1},
)


def every_option() -> list[ViTConfig]:
    """Return small ViTs with each combination of options that is allowed, and some sizes."""
    found = [replace(SMALL, **sizes) for sizes in SIZES]
    for choice in product(*VALUES.values()):
        try:
            found.append(replace(SMALL, **dict(zip(VALUES, choice, strict=True))))
        except ModelError:  # a distillation token and the mean of patches
            continue
    return found


def swin(**options: Any) -> ModelConfig:
    return model_config("swin_custom", **{**TINY_SWIN, "image_size": 32, "window_size": 4, **options})


CONFIGS: dict[str, list[Any]] = {
    "ViT": every_option(),
    "Swin": [
        swin(mlp_ratio=2.3),
        swin(image_size=8, window_size=1, depths=(2,), num_heads=(2,)),
        swin(image_size=24, window_size=3, depths=(1, 3), num_heads=(1, 2), channels=1),
        swin(image_size=12, window_size=6, depths=(2, 2), num_heads=(2, 4)),
        swin(image_size=8, window_size=100, depths=(2, 2), num_heads=(2, 4)),
    ],
    "MAE": [mae(), mae(channels=1, mask_ratio=0.5, patch_size=2), mae(embed_dim=8, num_heads=2, decoder_depth=4)],
    "BERT": [bert(), bert(tokens=7, positions=20, token_types=3, depth=3)],
    "T5": [t5(), t5(**V1_1), t5(depth=1, decoder_depth=3, tokens=5, decoder_tokens=21)],
}


def tokens_of_modules(layer: Layer) -> dict[str, int]:
    """Return a mapping that a forward of `layer` fills: the vectors of a sample that each described module gives."""
    tokens: dict[str, int] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
            tokens[name] = tokens.get(name, 0) + math.prod(output.shape[1:-1])

        return hook

    for part in layer.description.parts:
        if part.tokens and "" not in part.shapes and part.role not in ("pooled", "gate"):
            layer.get_submodule(part.name).register_forward_hook(note(part.name))
    return tokens


@pytest.mark.parametrize("family", CONFIGS)
def test_description_has_what_the_modules_have(family: str) -> None:
    """A training step has three times the operations of forward."""
    assert len(CONFIGS["ViT"]) > 90
    for config in CONFIGS[family]:
        model = LayeredModel(config).eval()
        initialise(model, 0, config)
        sides = {}
        if config.input.dtype is None:
            x = torch.randn(1, *config.input.shape)
        else:
            x, sides, _ = sample(config, 1)
        for name, layer in model.layers().items():
            described, tokens = config.layers[name], tokens_of_modules(layer)
            assert described.parameters == {key: tuple(p.shape) for key, p in layer.named_parameters()}, config
            taken, given = x, {key: sides[key] for key in layer.SIDE_INPUTS if key in sides}
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                x = layer(x, **given)
            assert described.flops == 3 * counter.get_total_flops(), (config, name)
            if described.takes is not None:
                assert taken.shape[1:] == (described.takes.tokens, described.takes.features), (config, name)
            rows = x if x.dim() == 3 else x[:, None]
            assert rows.shape[1:] == (described.gives.tokens, described.gives.features), (config, name)
            assert x.is_contiguous() and not x._is_view(), (config, name)
            parts = {part.name: part.tokens for part in described.parts}
            assert tokens and tokens == {part: parts[part] for part in tokens}, (config, name)
        shared = sum(math.prod(config.shape(copy)) for copy in config.shared)
        assert config.parameters == sum(p.numel() for p in model.parameters()) - shared
        assert all(before.gives == after.takes for before, after in pairwise(config.layers.values()))
        assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize("name", FAMILIES["vit"].published())
def test_description_of_published_models_has_the_parameters_of_the_modules(name: str) -> None:
    config = model_config(name)
    with torch.device("meta"):
        model = LayeredModel(config)
    for layer, module in model.layers().items():
        assert config.layers[layer].parameters == {key: tuple(p.shape) for key, p in module.named_parameters()}
    assert all(before.gives == after.takes for before, after in pairwise(config.layers.values()))
    assert config.groups == {} and [kind.kind for kind in config.block_kinds] == ["block"]
