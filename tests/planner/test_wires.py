"""Prices of steps that take as long as their messages between nodes, compared with closed forms."""

from dataclasses import replace
from typing import Any

import pytest

from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import price
from vitpar.planner.profile.cluster import Cluster, Network, Wire
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.strategy import parse, validate

CONFIG = model_config("vit_custom", embed_dim=384, num_heads=12, depth=12, patch_size=16, image_size=224)
BATCH, BANDWIDTH = 64, 1e6
WEIGHTS, ACTIVATION = 4 * CONFIG.parameters, 4 * BATCH * CONFIG.tokens * CONFIG.embed_dim
"""Bytes of all parameters, and of the activation between two blocks for the complete batch."""


def costs_of(cards: int) -> LayerCosts:
    """Return costs on two nodes of two devices, where only the network takes time: BANDWIDTH bytes/s a card."""
    cluster = Cluster(
        name="slow",
        nodes=2,
        devices_per_node=2,
        device_name="drawn",
        memory_bytes=10**11,
        matmul={"float32": 1e18},
        memory_bandwidth=1e18,
        sustained=1.0,
        sustained_bandwidth=1.0,
        intra=Wire(bandwidth=1e15, latency=0.0),
        inter=Network(bandwidth=BANDWIDTH, latency=0.0, nics_per_node=cards),
    )
    hardware = cluster.hardware()
    return LayerCosts(CONFIG, hardware, estimate_model(CONFIG, "fp32", hardware, tensors(CONFIG, hardware.ranks)))


@pytest.mark.parametrize("cards", [2, 1])
@pytest.mark.parametrize(
    ("mesh", "fields", "expected"),
    [
        # One ring over both nodes sends 2 · 3/4 of the gradients, spread over the cards.
        ("dp4", {}, 3 / 2 * WEIGHTS / 2),
        # Two pairs, each with half of the parameters; pairs within a node cost nothing.
        ("dp2xfsdp2", {}, WEIGHTS / 2),
        # Two pairs across nodes gather half of the parameters twice, and reduce the gradients.
        ("fsdp2xdp2", {}, 3 * WEIGHTS / 2),
        ("fsdp4", {}, 3 * 3 / 4 * WEIGHTS / 2),
        # Each block sums its outputs twice in forward and twice in backward.
        ("tp2xdp2", {}, 4 * CONFIG.depth * ACTIVATION / 2),
        # The messages of four micro-batches follow each other; the last one of backward has none beside it.
        ("pp2xdp2", {"microbatches": 4}, (4 + 1) * ACTIVATION / 4 / 2),
        ("pp2xdp2", {"microbatches": 4, "schedule": "gpipe"}, (4 + 4) * ACTIVATION / 4 / 2),
    ],
)
def test_slow_networks_take_as_long_as_their_bytes(
    mesh: str, fields: dict[str, Any], expected: float, cards: int
) -> None:
    """expected: bytes on the busiest card, if a node has two."""
    costs = costs_of(cards)
    found = price(validate(replace(parse(mesh), **fields), CONFIG, BATCH), costs, BATCH)
    assert found.seconds == pytest.approx(2 / cards * expected / BANDWIDTH, rel=0.02)
