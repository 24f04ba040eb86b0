"""Messages that follow a step's last product: which there are, and that all start before the first is waited for.

Nothing hides them, so each costs its latency. `docs/speed.md` lists them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.collectives import Events
from helpers.ranks import RankPool
from vitpar import Execution, model_config, parallelize, parse, validate
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.recipe.sections import OptimizerSection
from vitpar.training.step import TrainStep

BATCH = 8
VIT = {"name": "vit_custom", "image_size": 8, "patch_size": 4, "embed_dim": 24, "num_heads": 2, "num_classes": 4}


def after_the_last_product(device: torch.device, mesh: str, sizes: dict[str, Any]) -> list[str]:
    """Return the communication of a step after its last product, to the end of the update; runs on every rank."""
    config = model_config(**sizes)
    plan = validate(parse(mesh), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH), device)
    images = torch.randn(len(model.image_rows(BATCH)), 3, 8, 8)
    optimizer = ShardedOptimizer(model.named_parameters(), OptimizerSection(), matrices=config.hidden_matrices)
    step = TrainStep(model, optimizer, clip_grad_norm=1.0)
    step(1, 1e-3, images, torch.zeros(BATCH, dtype=torch.int64))
    with Events() as found, found.noting_waits():
        step(2, 1e-3, images, torch.zeros(BATCH, dtype=torch.int64))
    last = max(number for number, name in enumerate(found.names) if name == "product")
    return found.names[last + 1 :]


def norm(ranks: int) -> list[str]:
    return [f"all_reduce {ranks}"]


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("dp2", ["all_reduce 2", "wait", *norm(2)]),
        ("fsdp2", ["reduce_scatter 2", *norm(2)]),
        ("dp2+zero1", ["reduce_scatter 2", *norm(2)]),
        ("tp2", norm(2)),
        ("tp2xfsdp2+sp", ["reduce_scatter 2", "all_reduce 2", "wait", *norm(4)]),
        # Partial gradients along j and along k: two messages at once.
        ("tp8+3d", ["reduce_scatter 2", "all_reduce 2", "all_reduce 2", "wait", "wait", *norm(8)]),
        # Two meshes, of four and of eight shards, whose groups along j have the same ranks: one message.
        ("pp1: 0=dp2xfsdp2xtp2+sp, *=fsdp4xtp2+sp", ["reduce_scatter 4", "all_reduce 2", "wait", *norm(8)]),
        # Sums of layers without fully_shard and with it: both are on their way before the first is waited for.
        ("pp1: 1=tp2xfsdp2+sp, *=tp2xdp2+sp", ["all_reduce 4", "all_reduce 2", "wait", "wait", "wait", *norm(4)]),
    ],
)
def test_messages_after_the_last_product(
    mesh: str, expected: list[str], depth: int, ranks: Callable[[int], RankPool]
) -> None:
    """Their number does not depend on the depth, and all start before the first wait."""
    pool = ranks(parse(mesh).world_size)
    for found in pool.run(after_the_last_product, mesh, {**VIT, "depth": depth}):
        assert found == expected


def test_sums_along_two_axes_follow_each_other(ranks: Callable[[int], RankPool]) -> None:
    """Norms of queries and keys are partial along j and along k under 3d: the second sum needs the first."""
    for found in ranks(8).run(after_the_last_product, "tp8+3d", {**VIT, "depth": 2, "qk_norm": True}):
        assert found[-5:] == ["all_reduce 2", "wait", "all_reduce 2", "wait", *norm(8)]
