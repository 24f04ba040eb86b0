"""Description of a ViT compared with its modules: names and shapes of parameters, tokens, operations."""

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

from vitpar.errors import ModelError
from vitpar.models import ViTConfig, model_config
from vitpar.models.families import FAMILIES
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


def built(config: ViTConfig) -> LayeredModel:
    torch.manual_seed(0)
    model = LayeredModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    for layer in model.layers().values():
        layer.reset_buffers()
    return model


def tokens_of_modules(layer: Layer) -> dict[str, int]:
    """Return a mapping that a forward of `layer` fills: the vectors of a sample that each described module gives."""
    tokens: dict[str, int] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
            tokens[name] = tokens.get(name, 0) + math.prod(output.shape[1:-1])

        return hook

    for part in layer.description.parts:
        if "" not in part.shapes and part.role != "pooled":
            layer.get_submodule(part.name).register_forward_hook(note(part.name))
    return tokens


def test_description_has_the_parameters_tokens_and_shapes_of_the_modules() -> None:
    configs = every_option()
    assert len(configs) > 90
    for config in configs:
        model = built(config)
        x = torch.randn(2, config.channels, config.image_size, config.image_size)
        for name, layer in model.layers().items():
            described = config.layers[name]
            assert described.parameters == {key: tuple(p.shape) for key, p in layer.named_parameters()}, config
            if described.takes is not None:
                assert tuple(x.shape[1:]) == (described.takes.tokens, described.takes.features)
            tokens = tokens_of_modules(layer)
            x = layer(x)
            given = x if name != "head" else x[:, None]
            assert tuple(given.shape[1:]) == (described.gives.tokens, described.gives.features)
            parts = {part.name: part for part in described.parts}
            for part, found in tokens.items():
                assert found == parts[part].tokens, (config, name, part)
        assert config.parameters == sum(p.numel() for p in model.parameters())


def test_flops_match_torchs_counter() -> None:
    """A training step has three times the products of forward."""
    for config in every_option():
        model, counter = built(config), FlopCounterMode(display=False)
        x = torch.randn(1, config.channels, config.image_size, config.image_size)
        for name, layer in model.layers().items():
            with counter, sdpa_kernel(SDPBackend.MATH):
                x = layer(x)
            assert config.layers[name].flops == 3 * counter.get_total_flops(), (config, name)
            counter = FlopCounterMode(display=False)


@pytest.mark.parametrize("name", FAMILIES["vit"].published())
def test_description_of_published_models_has_the_parameters_of_the_modules(name: str) -> None:
    config = model_config(name)
    with torch.device("meta"):
        model = LayeredModel(config)
    for layer, module in model.layers().items():
        assert config.layers[layer].parameters == {key: tuple(p.shape) for key, p in module.named_parameters()}
    assert all(before.gives == after.takes for before, after in pairwise(config.layers.values()))
    assert config.groups == {} and [kind.kind for kind in config.block_kinds] == ["block"]
