"""Bytes of blocks' kernels by formula, compared with counts of `experiments/dry_bench.py` and with the model's code."""

import math
from typing import Any

import pytest
import torch

from vitpar.models import ViTConfig, model_config
from vitpar.models.compiled import is_whole
from vitpar.models.config import ModelConfig
from vitpar.models.vit.layers import Block
from vitpar.planner.profile.activations import usual_elements, vitpar_elements
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model
from vitpar.strategy import parse

BASE = "vit_base_patch16_224"
SCALED, DROPS = {"layer_scale": 1e-5}, {"drop_path": 0.1}
COUNTED: list[tuple[dict[str, Any], float, float]] = [
    ({}, 15.0, 26.3),
    (DROPS, 15.0, 30.4),
    ({"dropout": 0.1}, 17.6, 31.8),
    (SCALED, 17.0, 35.3),
    ({**SCALED, **DROPS}, 17.0, 37.3),
    ({"qk_norm": True}, 23.3, 33.5),
    ({"qkv_bias": "none"}, 15.0, 26.3),
    ({"qkv_bias": "qv"}, 19.0, 28.3),
    ({"rope": "dinov3"}, 23.0, 26.3),
    ({"rope": "dinov3", "qkv_bias": "none"}, 23.0, 32.3),
    ({"rope": "dinov3", "qkv_bias": "none", **SCALED}, 25.0, 41.2),
]
"""Passes in forward and backward of a block of B/16 with options, counted with 512 images."""


def passes(options: dict[str, Any], plan: str = "tp1", *, smallest: float = math.inf) -> tuple[float, float]:
    """Return the passes of a block of B/16."""
    config = model_config(BASE, **options)
    block = config.layers["blocks.1"]
    forward, backward = vitpar_elements(config, block, parse(plan).strategy, smallest)
    return forward / block.gives.elements, backward / block.gives.elements


def more(
    options: dict[str, Any], plan: str = "tp1", *, model: str = BASE, smallest: float = math.inf
) -> tuple[float, float]:
    """Return the passes of a model's second block in addition to the usual ones."""
    config, strategy = model_config(model, **options), parse(plan).strategy
    block = config.layers["blocks.1"]
    ours, usual = vitpar_elements(config, block, strategy, smallest), usual_elements(block, strategy)
    forward, backward = ((one - other) / block.gives.elements for one, other in zip(ours, usual, strict=True))
    return forward, backward


@pytest.mark.parametrize(("options", "forward", "backward"), COUNTED, ids=lambda value: str(value))
def test_passes_are_those_that_were_counted(options: dict[str, Any], forward: float, backward: float) -> None:
    assert passes(options) == pytest.approx((forward, backward), rel=0.02)


def test_other_code_bases_have_the_usual_passes() -> None:
    config = model_config(BASE)
    block, strategy = config.layers["blocks.1"], parse("tp1").strategy
    assert usual_elements(block, strategy) == (18 * block.gives.elements, 36 * block.gives.elements)
    assert vitpar_elements(ModelConfig(), block, strategy) == usual_elements(block, strategy)
    hardware = find_cluster("1xH200").hardware()
    times = {
        (compiled, ours): [
            (layer.forward.seconds(512), layer.backward.seconds(512))
            for layer in estimate_model(
                config, "bf16", hardware, ("tp1",), compiled=compiled, vitpar_blocks=ours
            ).layers
        ]
        for compiled in (False, True)
        for ours in (False, True)
    }
    assert times[False, True] == times[False, False], "eager blocks are alike"
    assert times[True, True] != times[True, False]


@pytest.mark.parametrize("options", [{}, {"qkv_bias": "all", **SCALED}])
def test_float8_keeps_the_sum_and_packs_heads_and_tensor_parallelism_keeps_the_sum(options: dict[str, Any]) -> None:
    scales = 7 * ("layer_scale" in options)
    assert more(options, smallest=0) == pytest.approx((-1, -4 + scales))
    assert more(options, smallest=4000) == more(options), "no layer of B/16 is that large"
    assert more(options, "tp2") == pytest.approx((-1, -1 + scales))
    assert more(options, "tp2+sp") == pytest.approx((-1 / 2, (-1 + scales) / 2)), "the stream is split"


@pytest.mark.parametrize("options", [{}, SCALED, DROPS, {"dropout": 0.1}, {"qkv_bias": "qv"}, {"qkv_bias": "none"}])
def test_conditions_are_those_of_the_model(options: dict[str, Any]) -> None:
    config = model_config(BASE, **options)
    assert isinstance(config, ViTConfig)
    with torch.device("meta"):
        block = Block(config, 1)
        ends = block._ends_in_products(torch.empty(1, dtype=torch.int64))
    unscaled, apart = more({**options, "dropout": 0.0, "layer_scale": None}), 4 * (config.qkv_bias == "qv")
    dropped = 0.5 * ("dropout" in options)
    assert more(options)[0] == (-3 if ends else -1) + apart + dropped and unscaled[0] == -3 + apart
    # Rotary positions cost more in backward where the gradients are not packed.
    rotated = passes({**options, "rope": "dinov3"})[1] - passes(options)[1]
    assert (rotated == 0) == is_whole(block.attn.qkv)
