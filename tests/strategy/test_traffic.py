"""The traffic table of a layer, which planning prices, compared with what a layer sends."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from helpers.collectives import Sent
from helpers.modern_vits import modern_config
from helpers.ranks import RankPool
from helpers.text_models import TokenLoss
from vitpar import Execution, model_config, parallelize, parse, validate
from vitpar.models.config import ModelConfig
from vitpar.models.layers import given_sides, zero_sides
from vitpar.models.lora import adapted
from vitpar.models.loss import CrossEntropy
from vitpar.strategy import token_layout
from vitpar.strategy.layout import mesh_axes
from vitpar.strategy.traffic import Traffic, layer_traffic

ROWS = 16
CONFIG = model_config(
    "vit_custom", patch_size=4, image_size=12, embed_dim=24, depth=2, num_heads=4, mlp_hidden_dim=72, num_classes=3
)


SWIN = model_config(
    "swin_custom",
    **{"patch_size": 2, "image_size": 16, "window_size": 2, "embed_dim": 24, "depths": (2, 1, 2)},
    **{"num_heads": (4, 4, 8), "mlp_ratio": 2.5, "num_classes": 3},
)


def sent_by_a_layer(device: torch.device, mesh: str, layer: str, config: ModelConfig) -> tuple[Counter, Counter]:
    """Return the layer's collectives along tensor axes in forward and in backward; runs on every rank."""
    plan = validate(parse(mesh), config, ROWS)
    loss = TokenLoss() if len(config.output_shape) > 1 else CrossEntropy()
    model = parallelize(config, plan, Execution(ROWS), device, loss)
    (stage,) = model.stages.values()
    part = token_layout(plan.strategy)[model.pipe.get_local_rank("stage")]
    if takes := config.layers[layer].takes:
        x = torch.randn(len(part.row_range(ROWS)), takes.tokens, len(part.feature_range(takes.features)))
        x.requires_grad_()
    else:
        shape = len(model.image_rows(ROWS)), *config.input.shape
        x = torch.randn(shape) if config.input.dtype is None else torch.zeros(shape, dtype=torch.int64)
    axes = next(m.tensor_mesh for m in stage.layers()["blocks.1"].modules() if hasattr(m, "tensor_mesh"))
    names = {axes.get_group(axis).group_name: (axis, axes.get_group(axis).size()) for axis in axes.mesh_dim_names}
    sides = zero_sides(config, ROWS, "cpu")
    rows, group = (parts[layer].row_range(ROWS) for parts in (stage.rows, stage.group_rows))
    here, inside = slice(rows.start, rows.stop), slice(group.start, group.stop)
    with Sent() as forward:
        y = stage.layers()[layer](x, **given_sides(stage.layers()[layer], None, sides, here, inside))
        if model.vocabulary is not None and config.layers[layer].last:
            y = model.loss(y, torch.zeros(ROWS, *config.output_shape[:-1], dtype=torch.int64))
    with Sent() as backward:
        y.sum().backward()
    found = []
    for sent in (forward, backward):
        rows = [((name, *names[group], n), times) for (name, group, n), times in sent.sizes.items() if group in names]
        found.append(Counter(dict(rows)))
    return tuple(found)


MESHES = ("tp2", "tp4", "dp2xtp2", "tp4+sp", "tp2xfsdp2+sp", "tp4+2d", "tp8+2.5d", "tp8+3d")
HEADS: tuple[dict, ...] = ({}, {"pool": "avg", "representation_size": 12}, {"distillation": True})


@pytest.mark.parametrize(
    "mesh", [*MESHES, *(f"{mesh}{flag}" for mesh in MESHES for flag in ("+ckpt", "+ckpt.selective"))]
)
def test_collectives_of_a_block_match_the_table(mesh: str, ranks: Callable[[int], RankPool]) -> None:
    assert_sent(mesh, "blocks.1", CONFIG, ranks)


@pytest.mark.parametrize("mesh", ["tp8+3d", "tp8+3d+ckpt"])
def test_collectives_of_a_block_with_adapters_match_the_table(mesh: str, ranks: Callable[[int], RankPool]) -> None:
    """Those of some of its linear layers, of both roles; tests/planner/test_priced_bytes.py has the other modes."""
    assert_sent(mesh, "blocks.1", adapted(CONFIG, 5, 8.0, ("qkv", "proj", "fc2")), ranks)


@pytest.mark.parametrize("options", HEADS, ids=["token", "mean", "two tokens"])
@pytest.mark.parametrize("mesh", [*MESHES, "tp4+ckpt", "tp4+sp+ckpt", "tp8+3d+ckpt", "tp8+2.5d+ckpt.selective"])
def test_collectives_of_a_head_match_the_table(mesh: str, options: dict, ranks: Callable[[int], RankPool]) -> None:
    assert_sent(mesh, "head", replace(CONFIG, **options), ranks)


def every_layer_sends(device: torch.device, mesh: str, config: ModelConfig) -> dict[str, tuple[Counter, Counter]]:
    """Return the collectives of one layer of each kind, by name; runs on every rank."""
    return {layer.name: sent_by_a_layer(device, mesh, layer.name, config) for layer in config.kinds.values()}


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "mesh",
    [
        *(*MESHES, "tp4+2d+ckpt", "tp4+sp+ckpt.selective"),
        *(pytest.param(f"{mesh}+ckpt", marks=slow) for mesh in MESHES if mesh != "tp4+2d"),
    ],
)
def test_collectives_of_every_kind_of_layer_of_swin_match_the_table(
    mesh: str, ranks: Callable[[int], RankPool]
) -> None:
    strategy, counts = parse(mesh).strategy, ranks(parse(mesh).world_size).run(every_layer_sends, mesh, SWIN)
    assert list(counts[0]) == ["embed", "blocks.0", "blocks.2", "blocks.3", "blocks.4", "head"]
    for found in counts:
        for name, counted in found.items():
            assert counted == counters(layer_traffic(SWIN.layers[name], strategy, ROWS)), name


@pytest.mark.parametrize("parts", ["eva02_clip", "vit_22b", "siglip2", "fc_norm", "rms"])
@pytest.mark.parametrize(
    "mesh", ["tp4+sp", "tp4+2d", "tp8+3d", *(pytest.param(m, marks=slow) for m in ("tp4", "tp4+ckpt", "tp8+3d+ckpt"))]
)
def test_collectives_of_modern_models_match_the_table(mesh: str, parts: str, ranks: Callable[[int], RankPool]) -> None:
    config, strategy = modern_config(parts), parse(mesh).strategy
    for found in ranks(parse(mesh).world_size).run(every_layer_sends, mesh, config):
        for name, counted in found.items():
            assert counted == counters(layer_traffic(config.layers[name], strategy, ROWS)), name


def counters(table: tuple[Traffic, Traffic]) -> tuple[Counter, ...]:
    return tuple(Counter({(c.operation, c.axis, c.ranks, c.elements): n for c, n in part.items()}) for part in table)


def assert_sent(mesh: str, layer: str, config: ModelConfig, ranks: Callable[[int], RankPool]) -> None:
    table = layer_traffic(config.layers[layer], parse(mesh).strategy, ROWS)
    for counted in ranks(parse(mesh).world_size).run(sent_by_a_layer, mesh, layer, config):
        assert counted == counters(table)


def received(traffic: Traffic) -> float:
    return sum(collective.received * times for collective, times in traffic.items())


@pytest.mark.parametrize(
    ("mesh", "batch", "width", "millions"),
    [
        ("tp8", 512, 4096, 2892),
        ("tp8+2.5d", 512, 4096, 874),
        ("tp8+3d", 512, 4096, 1703),
        ("tp64", 512, 4096, 3253),
        ("tp64+2d", 512, 4096, 677),
        ("tp64+2.5d@4", 512, 4096, 365),
        ("tp64+3d", 512, 4096, 639),
        ("tp8+2.5d", 1024, 1024, 371),
        ("tp8+3d", 1024, 1024, 829),
    ],
)
def test_volumes_match_the_published_algorithms(mesh: str, batch: int, width: int, millions: int) -> None:
    """Count as the papers do: gathered activations are kept for backward, and weights are gathered once."""
    model = model_config("vit_custom", patch_size=16, embed_dim=width, depth=1, num_heads=64)
    strategy = parse(mesh).strategy
    forward, backward = layer_traffic(model.layers["blocks.0"], strategy, batch)
    again = Counter({c: times for c, times in forward.items() if c.operation == "all_gather"})
    kept = received(forward) + received(backward) - received(again)
    sizes = dict(mesh_axes(strategy))
    copies = sizes.get("d", 1)
    share = 12 * width**2 * copies / math.prod(sizes.values())  # a rank's shard of the four matrices
    weights = 2 * (sizes.get("i", 1) - 1) * share + 2 * (1 - 1 / copies) * share
    assert (kept + weights) / 1e6 == pytest.approx(millions, rel=5e-3)  # vitpar also sends the statistics of norms
