"""Prices, bounds and searches for trainings with frozen layers."""

import math
from dataclasses import replace

import pytest
import torch

from helpers.searches import assert_bounds_hold
from vitpar import Execution, model_config, parallelize, parse, validate
from vitpar.models.config import ModelConfig
from vitpar.models.derived import with_frozen
from vitpar.models.lora import adapted
from vitpar.planner.automatic import search
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.measure.device import LiveBytes
from vitpar.planner.search.best import Search
from vitpar.planner.search.space import Space
from vitpar.planner.sources import estimated_costs
from vitpar.strategy.freezing import listed_parameters

BATCH = 16
CONFIG = model_config(
    "vit_custom", patch_size=8, image_size=64, embed_dim=192, depth=6, num_heads=4, num_classes=10, channels=3
)
SWIN = model_config("swin_nano_patch2_window4_32", num_classes=10)
FREEZES = ("embed, *", "embed, 0-2", "2-3", "head", "embed, 0, 5", "embed, *, !*.bias")


def costs_of(config: ModelConfig, freeze: str | None, ranks: int = 4, precision: str = "fp32") -> LayerCosts:
    frozen = listed_parameters(freeze, config) if freeze else frozenset()
    return estimated_costs(config, "8xH100", precision, ranks=ranks, frozen=frozen)


def priced(mesh: str, freeze: str | None, config: ModelConfig = CONFIG, **fields: object) -> Price:
    plan = validate(replace(parse(mesh), **fields), config, BATCH)
    return price(plan, costs_of(config, freeze), BATCH)


def elements(config: ModelConfig, freeze: str) -> tuple[int, int]:
    """Return the elements of (all parameters, trained ones)."""
    frozen = listed_parameters(freeze, config)
    return config.parameters, config.parameters - sum(math.prod(config.shape(name)) for name in frozen)


@pytest.mark.parametrize("freeze", FREEZES)
def test_only_trained_parameters_have_gradients_and_optimizer_state(freeze: str) -> None:
    every, trained = elements(CONFIG, freeze)
    (memory,) = priced("dp1", freeze).memory
    assert memory.parameters == 4 * every
    assert memory.optimizer == 8 * trained
    assert memory.gradients <= 4 * trained * (1 + 1e-9)
    offloaded = priced("dp1+offload", freeze).memory[0]
    assert offloaded.host == 4 * every + 12 * trained


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        *((CONFIG, mesh) for mesh in ("fsdp4", "pp2xtp2", "dp4+zero1", "dp4+ckpt")),
        *((SWIN, mesh) for mesh in ("dp4", "tp2xfsdp2", "pp2xdp2")),
    ],
)
def test_more_frozen_layers_cost_less(config: ModelConfig, mesh: str) -> None:
    """A backward that ends higher saves memory and time."""
    freezes = (None, "1", "0-1", "embed, 0-1", "embed, *")
    found = [priced(mesh, freeze, config, microbatches=2) for freeze in freezes]
    seconds, needs = [one.seconds for one in found], [max(m.total - m.reserved for m in one.memory) for one in found]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 0.6 * seconds[0]
    assert needs == sorted(needs, reverse=True) and needs[-1] < 0.7 * needs[0]


def test_adapters_cost_little_memory_and_no_products_for_frozen_weights() -> None:
    frozen = listed_parameters("embed, *, !*.lora_?.*", ADAPTED)
    (memory,) = priced("dp1", "embed, *, !*.lora_?.*", ADAPTED).memory
    trained = sum(math.prod(ADAPTED.shape(name)) for name in ADAPTED.adapters) + CONFIG.layers["head"].numel
    assert memory.optimizer == 8 * trained and memory.gradients <= 4 * trained * (1 + 1e-9)
    block = with_frozen(ADAPTED, frozen).layers["blocks.1"]
    base = CONFIG.layers["blocks.1"]
    assert block.attention is not None
    narrow = sum(part.flops for part in block.parts if part.adapts)
    assert narrow == 2 * 65 * 8 * sum(sum(part.product) for part in base.parts if part.product)
    assert block.flops == 2 * sum(part.flops for part in base.parts) + 3 * (narrow + block.attention.flops)


def test_flops_of_a_step_count_the_backward_that_runs() -> None:
    """A frozen block computes two of three products, and one below the lowest trained layer only its forward."""
    block = CONFIG.layers["blocks.0"]
    products = sum(part.flops for part in block.parts)
    assert block.attention is not None
    lower = with_frozen(CONFIG, listed_parameters("embed, 0", CONFIG)).layers["blocks.0"]
    middle = with_frozen(CONFIG, listed_parameters("1", CONFIG)).layers["blocks.1"]
    assert lower.flops == products + block.attention.flops
    assert middle.flops == 2 * products + 3 * block.attention.flops
    partly = with_frozen(CONFIG, listed_parameters("1", CONFIG))
    assert CONFIG.flops - partly.flops == products
    assert partly.layer_flops == CONFIG.layer_flops  # stages stay as they are


ADAPTED = adapted(CONFIG, 8, 8.0)


@pytest.mark.parametrize(
    ("config", "freeze"),
    [
        *((CONFIG, freeze) for freeze in ("embed, *", "embed, 0-2", "2-3", "embed, *, !*.bias")),
        (ADAPTED, "embed, *, !*.lora_?.*"),
        (adapted(CONFIG, 48, 8.0, ("qkv",)), "embed, *, !*.lora_?.*"),
    ],
)
def test_activations_are_close_to_those_of_a_step(config: ModelConfig, freeze: str, alone: None) -> None:
    """Counted between forward and backward of a real model: what autograd keeps for trained and frozen blocks."""
    frozen = listed_parameters(freeze, config)
    model = parallelize(config, validate(parse("dp1"), config, BATCH), Execution(BATCH, frozen=frozen), "cpu")
    (stage,) = model.stages.values()
    images = torch.randn(BATCH, 3, 64, 64)
    with LiveBytes() as live:
        loss = model.loss(stage(images), torch.zeros(BATCH, dtype=torch.int64))
        kept, most = live.now, live.most
    del loss
    memory = priced("dp1", freeze, config).memory[0]
    predicted = memory.activations + memory.workspace
    assert kept <= 1.15 * predicted, (kept, predicted)
    assert 0.6 * most <= predicted <= 1.6 * most, (most, predicted)


@pytest.mark.parametrize(
    ("flag", "schedules", "freezes"),
    [
        ("zero1", ("gpipe", "zbvzerobubble", "interleaved1f1b"), ("embed, *", "2-3", "embed, 0, 5")),
        ("zero2", ("1f1b",), ("embed, 0-2", "head")),
        ("ckpt", ("1f1b",), ("2-3", "embed, *, !*.bias")),
    ],
)
def test_bounds_of_uniform_plans_do_not_exceed_their_prices(
    flag: str, schedules: tuple[str, ...], freezes: tuple[str, ...]
) -> None:
    """A bound that exceeds a price could hide the best plan."""
    for freeze in freezes:
        costs = costs_of(CONFIG, freeze)
        space = Space(costs.config, 4, (BATCH,), flags=(flag,), schedules=schedules)
        assert_bounds_hold(Search(space, costs), BATCH)


def test_python_search_takes_frozen_layers() -> None:
    """A probe of a frozen model fits where its training does not."""
    arguments = {"cluster": "2xH100", "batch_size": 64, "seconds": 2.0}
    whole = search("vit_base_patch16_224", **arguments).plans[0]
    probe = search("vit_base_patch16_224", freeze="embed, *", **arguments).plans[0]
    assert probe.images_per_second > 2 * whole.images_per_second
