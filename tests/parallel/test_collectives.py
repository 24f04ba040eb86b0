"""Collectives of every plan in one step, and of its end, compared with tables that give the reasons."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from helpers.collectives import Events, Sent
from helpers.ranks import Ranks
from vitpar import Execution, ParallelModel, model_config, parallelize, parse, validate
from vitpar.parallel import Communication
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.training.optim.norms import clip_, global_norm
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.step import TrainStep

BATCH = 8


@dataclass(frozen=True)
class Row:
    """Expected communication of one rank under a plan."""

    mesh: str
    """Strategy string."""

    why: str
    """Reason for the counts; printed when they differ."""

    step: dict[str, int]
    """Operations of rank 0 in a step, by name."""

    last: dict[str, int] | None = None
    """Operations of the last rank, which is in the last stage. None if they equal `step`."""

    plan: dict[str, Any] = field(default_factory=dict)
    """Other fields of the plan."""

    model: dict[str, Any] = field(default_factory=dict)
    """Options of the model."""

    communication: dict[str, Any] = field(default_factory=dict)
    """Fields of `Communication`."""

    def __str__(self) -> str:
        parts = (self.plan, self.model, self.communication)
        return " ".join([self.mesh, *(f"{k}={v}" for part in parts for k, v in part.items())])


NORM = 1  # the gradient norm takes one all-reduce under any plan
FOUR = {"microbatches": 4}
ZBV = {"schedule": "zbvzerobubble", "virtual_stages": 2, **FOUR}
ZBV_SENT = {"send": 8, "receive": 8, "reduce_scatter": 4 * 2 * (2 + 2)}
TABLE = (
    Row("dp1", "one rank has nobody to send to", {}),
    Row("dp2", "an all-reduce of gradients, which layers as small as these share", {"all_reduce": 1 + NORM}),
    Row("dp2", "the same once a step, whatever the micro-batches", {"all_reduce": 1 + NORM}, plan=FOUR),
    Row(
        "fsdp2",
        "each layer is gathered in forward, and again in backward but for the head, whose backward follows at once",
        {"all_gather": 4 + 3, "reduce_scatter": 4, "all_reduce": NORM},
    ),
    Row(
        "fsdp2",
        "the gathers in every micro-batch, the gradients once; upstream: FSDP2 prefetches the head once for nothing",
        {"all_gather": 4 * (4 + 3) + 1, "reduce_scatter": 4, "all_reduce": NORM},
        plan=FOUR,
    ),
    Row(
        "dp2",
        "gradients of each layer in a message of its own",
        {"all_reduce": 4 + NORM},
        communication={"bucket_cap_mb": 1e-6},
    ),
    Row(
        "fsdp2",
        "gradients become parts in every micro-batch",
        {"all_gather": 4 * (4 + 3) + 1, "reduce_scatter": 4 * 4, "all_reduce": NORM},
        plan=FOUR,
        communication={"reduce_every_microbatch": True},
    ),
    Row(
        "fsdp2",
        "nothing is dropped after forward, so that backward need not gather",
        {"all_gather": 4, "reduce_scatter": 4, "all_reduce": NORM},
        communication={"reshard_after_forward": False},
    ),
    Row(
        "fsdp2+ckpt",
        "recomputing a block uses the copy that its backward gathered",
        {"all_gather": 4 + 3, "reduce_scatter": 4, "all_reduce": NORM},
    ),
    Row(
        "tp2",
        "2 in forward and 2 in backward of each block; the head's sum in forward, its input's gradient in backward",
        {"all_reduce": 2 * (2 + 2) + 1 + NORM, "all_gather": 1},
    ),
    Row(
        "tp2",
        "the same for every micro-batch",
        {"all_reduce": 4 * (2 * (2 + 2) + 1) + NORM, "all_gather": 4},
        plan=FOUR,
    ),
    Row(
        "tp2+ckpt",
        "recomputing stops before the second all-reduce of a block, whose result backward does not need",
        {"all_reduce": 2 * (2 + 2 + 1) + 1 + NORM, "all_gather": 1},
    ),
    Row(
        "tp2+ckpt.selective",
        "what was sent is kept, so computing again sends nothing",
        {"all_reduce": 2 * (2 + 2) + 1 + NORM, "all_gather": 1},
    ),
    Row(
        "tp2",
        "norms of split heads have partial gradients: one sum a step for all of them; a second classifier",
        {"all_reduce": 2 * (2 + 2) + 1 + 2 + NORM, "all_gather": 2},
        model={"qk_norm": True, "distillation": True},
    ),
    Row(
        "dp2xtp2+sp",
        "gradients of split parameters are summed over dp, others over dp and tp at once; the head sums classes",
        {"all_gather": 2 * (2 + 4) + 2, "reduce_scatter": 2 * (2 + 2), "all_reduce": 2 + 1 + NORM},
    ),
    Row(
        "tp2xfsdp2+sp",
        "under fully_shard partial gradients are summed after backward",
        {"all_gather": 4 + 3 + 2 * (2 + 4) + 2, "reduce_scatter": 4 + 2 * (2 + 2), "all_reduce": 1 + 1 + NORM},
    ),
    Row("pp2", "4 micro-batches over one border, there and back", {"send": 4, "receive": 4, "all_reduce": NORM}),
    Row(
        "pp2",
        "3 borders between 4 stages on 2 ranks, there and back for 4 micro-batches",
        {"send": 12, "receive": 12, "all_reduce": NORM},
        plan={"schedule": "interleaved1f1b", "virtual_stages": 2},
        model={"depth": 4},
    ),
    Row(
        "pp2xtp2",
        "a block's all-reduces for every micro-batch, and the head's in the last stage",
        {"send": 4, "receive": 4, "all_reduce": 4 * (2 + 2) + NORM},
        {"send": 4, "receive": 4, "all_reduce": 4 * (2 + 2 + 1) + NORM, "all_gather": 4},
    ),
    Row(
        "pp2xtp2+sp",
        "a block gathers 2 inputs in forward and again for its weights, and 2 gradients; 2 sums in forward and 2 in "
        "backward; the first rank has the head, too; partial gradients are summed once",
        ZBV_SENT | {"all_gather": 4 * (2 * (2 + 2 + 2) + 2), "all_reduce": 4 + 1 + NORM},
        ZBV_SENT | {"all_gather": 4 * 2 * (2 + 2 + 2), "all_reduce": 1 + NORM},
        plan=ZBV,
        model={"depth": 4},
    ),
    Row(
        "pp2xfsdp2",
        "the 2 layers of a stage are gathered once and stay for all micro-batches of the step",
        {"send": 4, "receive": 4, "all_gather": 2, "reduce_scatter": 2, "all_reduce": NORM},
    ),
    Row(
        "dp2xfsdp2",
        "as fsdp, and the shards' gradients are summed over dp",
        {"all_gather": 4 + 3, "reduce_scatter": 4, "all_reduce": 4 + NORM},
    ),
    Row(
        "tp2xfsdp2",
        "as tp and as fsdp",
        {"all_gather": 4 + 3 + 1, "reduce_scatter": 4, "all_reduce": 2 * (2 + 2) + 1 + NORM},
    ),
)


def built(device: torch.device, row: Row, **execution: Any) -> tuple[ParallelModel, ShardedOptimizer]:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3}
    config = model_config("vit_custom", **{**sizes, **row.model})
    plan = validate(replace(parse(row.mesh), **row.plan), config, BATCH)
    communication = Communication(**row.communication)
    model = parallelize(config, plan, Execution(BATCH, communication=communication, **execution), device)
    return model, ShardedOptimizer(model.named_parameters(), OptimizerSection())


def backward(model: ParallelModel) -> None:
    images = torch.ones(len(model.image_rows(BATCH)), 3, 8, 8) if model.takes_images else None
    model.forward_backward(images, torch.zeros(BATCH, dtype=torch.int64))


def update(model: ParallelModel, optimizer: ShardedOptimizer) -> None:
    gradients = optimizer.gradients()
    clip_(gradients, global_norm(gradients, model), 1.0)
    optimizer.step(1e-3)


def sent_in_a_step(device: torch.device, row: Row) -> tuple[dict[str, int], dict[str, int]]:
    """Return this rank's collectives in a step, and those of its optimizer part; runs on every rank."""
    model, optimizer = built(device, row)
    backward(model)
    update(model, optimizer)
    with Sent() as whole:
        backward(model)
        with Sent() as updating:
            update(model, optimizer)
    return dict(whole.counts), dict(updating.counts)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_collectives_of_a_step_match_the_table(row: Row, ranks: Ranks) -> None:
    """An unexpected collective costs speed that no test of results would notice."""
    world = parse(row.mesh).world_size
    counted = ranks(world).run(sent_in_a_step, row)
    assert (counted[0][0], row.why) == (row.step, row.why)
    assert (counted[-1][0], row.why) == (row.last or row.step, row.why)
    for _, updating in counted:
        assert updating == ({"all_reduce": NORM} if world > 1 else {})


def reduced_bytes(device: torch.device, mesh: str, precision: str, reduce_dtype: str | None) -> int:
    """Return the bytes of the gradients that this rank sends in a step; runs on every rank."""
    model, _ = built(device, Row(mesh, "", {}), precision=precision, reduce_dtype=reduce_dtype)
    with Sent() as sent:
        backward(model)
    return sent.bytes["all_reduce" if mesh == "dp2" else "reduce_scatter"]


@pytest.mark.parametrize(("precision", "reduce_dtype"), [("fp16", "fp16"), ("bf16", "bf16")])
@pytest.mark.parametrize("mesh", ["dp2", "fsdp2"])
def test_gradients_are_reduced_in_the_given_dtype(mesh: str, precision: str, reduce_dtype: str, ranks: Ranks) -> None:
    for wide in ranks(2).run(reduced_bytes, mesh, precision, None):
        assert ranks(2).run(reduced_bytes, mesh, precision, reduce_dtype) == [wide // 2] * 2


def listed(device: torch.device, row: Row) -> tuple[list[str], dict[str, int]]:
    """Return products and collectives of a step in order, and the bytes of the collectives; runs on every rank."""
    model, optimizer = built(device, row)
    backward(model)
    update(model, optimizer)
    with Sent() as sent, Events() as events:
        backward(model)
        update(model, optimizer)
    return events.names, dict(sent.bytes)


@pytest.mark.parametrize(
    ("fsdp", "zero1"), [("fsdp2", "dp2+zero1"), ("fsdp2+ckpt", "dp2+zero1+ckpt"), ("tp2xfsdp2+sp", "tp2xdp2+sp+zero1")]
)
def test_zero1_is_fsdp_that_keeps_parameters_until_backward(fsdp: str, zero1: str, ranks: Ranks) -> None:
    """With one micro-batch. With two, +zero1 keeps them for the second, too."""
    pool, kept = ranks(parse(fsdp).world_size), {"reshard_after_forward": False}
    for one, other in zip(
        pool.run(listed, Row(fsdp, "", {}, communication=kept)), pool.run(listed, Row(zero1, "", {})), strict=True
    ):
        assert one == other
    two = {"microbatches": 2}
    once = pool.run(sent_in_a_step, Row(zero1, "", {}, plan=two))[0][0]
    twice = pool.run(sent_in_a_step, Row(fsdp, "", {}, plan=two, communication=kept))[0][0]
    assert twice == {**once, "all_gather": once["all_gather"] + 4}


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
def test_messages_after_the_last_product(mesh: str, expected: list[str], ranks: Ranks) -> None:
    """They are as few for four blocks, and all start before the first wait."""
    for found in ranks(parse(mesh).world_size).run(after_the_last_product, mesh, {**VIT, "depth": 4}):
        assert found == expected


def test_sums_along_two_axes_follow_each_other(ranks: Ranks) -> None:
    """Norms of queries and keys are partial along j and along k under 3d: the second sum needs the first."""
    for found in ranks(8).run(after_the_last_product, "tp8+3d", {**VIT, "depth": 2, "qk_norm": True}):
        assert found[-5:] == ["all_reduce 2", "wait", "all_reduce 2", "wait", *norm(8)]
