"""The traffic table of a layer, which planning prices, compared with what a layer sends."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from helpers.collectives import Sent
from helpers.modern_vits import modern_config
from helpers.ranks import Ranks
from vitpar import Execution, model_config, parallelize, parse, validate
from vitpar.models.config import ModelConfig
from vitpar.models.lora import adapted
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


def sent_by_every_layer(device: torch.device, mesh: str, config: ModelConfig) -> dict[str, tuple[Counter, Counter]]:
    """Return the collectives along tensor axes in forward and in backward of one layer of each kind, by its name.

    Runs on every rank.
    """
    plan = validate(parse(mesh), config, ROWS)
    model = parallelize(config, plan, Execution(ROWS), device)
    (stage,) = model.stages.values()
    axes = next(m.tensor_mesh for m in stage.layers()["blocks.1"].modules() if hasattr(m, "tensor_mesh"))
    groups = {axes.get_group(axis).group_name: (axis, axes.get_group(axis).size()) for axis in axes.mesh_dim_names}
    part = token_layout(plan.strategy)[model.pipe.get_local_rank("stage")]
    found = {}
    for name in (layer.name for layer in config.kinds.values()):
        if takes := config.layers[name].takes:
            x = torch.randn(len(part.row_range(ROWS)), takes.tokens, len(part.feature_range(takes.features)))
            x.requires_grad_()
        else:
            x = torch.randn(len(model.image_rows(ROWS)), *config.input.shape)
        with Sent() as forward:
            y = stage.layers()[name](x)
        with Sent() as backward:
            y.sum().backward()
        found[name] = along(groups, forward), along(groups, backward)
    return found


def along(groups: dict[str, tuple[str, int]], sent: Sent) -> Counter:
    """Return the collectives along the axes of some groups."""
    sizes = sent.sizes.items()
    return Counter({(name, *groups[group], n): times for (name, group, n), times in sizes if group in groups})


CONFIGS = {
    "ViT": CONFIG,
    "mean pooling": replace(CONFIG, pool="avg", representation_size=12),
    "two tokens": replace(CONFIG, distillation=True),
    # Adapters of some linear layers, of both roles; tests/planner/test_priced_bytes.py has the other modes.
    "adapters": adapted(CONFIG, 5, 8.0, ("qkv", "proj", "fc2")),
    "Swin": SWIN,
    **{parts: modern_config(parts) for parts in ("eva02_clip", "vit_22b", "siglip2", "fc_norm", "rms")},
}
QUICK = (
    *(("ViT", mesh) for mesh in ("tp2", "tp4+sp+ckpt", "tp4+2d", "tp8+3d")),
    *(("Swin", "tp4+2d"), ("eva02_clip", "tp4+sp"), ("two tokens", "tp4+2d+ckpt.selective")),
)
SLOW = (
    *(("ViT", mesh) for mesh in ("tp4+ckpt", "dp2xtp2+ckpt.selective", "tp2xfsdp2+sp", "tp8+2.5d", "tp8+3d+ckpt")),
    *(("mean pooling", mesh) for mesh in ("tp4+sp", "tp8+3d+ckpt.selective")),
    *(("two tokens", "tp2xfsdp2+sp"), ("adapters", "tp8+3d+ckpt"), ("Swin", "tp4+sp+ckpt"), ("Swin", "tp8+3d+ckpt")),
    *(("vit_22b", "tp4+2d"), ("siglip2", "tp8+3d"), ("fc_norm", "tp4+sp"), ("rms", "tp4+2d+ckpt")),
)


@pytest.mark.each_row
@pytest.mark.parametrize(("name", "mesh"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)])
def test_collectives_of_every_kind_of_layer_match_the_table(name: str, mesh: str, ranks: Ranks) -> None:
    config, strategy = CONFIGS[name], parse(mesh).strategy
    for found in ranks(parse(mesh).world_size).run(sent_by_every_layer, mesh, config):
        assert {"embed", "head"} < found.keys()
        for layer, counted in found.items():
            assert counted == counters(layer_traffic(config.layers[layer], strategy, ROWS)), layer


def counters(table: tuple[Traffic, Traffic]) -> tuple[Counter, ...]:
    return tuple(Counter({(c.operation, c.axis, c.ranks, c.elements): n for c, n in part.items()}) for part in table)


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
