"""Prices of plans against known results: idle shares, memory by hand, and overlap."""

from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from vitpar.models import ViTConfig, model_config
from vitpar.planner.cost.elements import layer_parameters
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.links import Links, RankGroup, hop, layer_groups
from vitpar.planner.cost.memory import _Walk
from vitpar.planner.cost.pipeline import idle_share
from vitpar.planner.cost.price import Price, price
from vitpar.planner.cost.stage import Streams
from vitpar.planner.profile.curves import Curve, Timing
from vitpar.planner.profile.estimate import tensors
from vitpar.planner.profile.profiles import (
    CHECKPOINTS,
    Bytes,
    Hardware,
    LayerProfile,
    Link,
    Matmul,
    ModelProfile,
    Overlap,
    WeightProfile,
)
from vitpar.strategy import parse, validate

CONFIG = model_config("vit_custom", patch_size=8, image_size=32, embed_dim=64, depth=8, num_heads=4, num_classes=10)
MB = 2**20


def line(seconds: float, sizes: tuple[int, ...] = (1, 2**30)) -> tuple[Timing, ...]:
    """Return timings that take `seconds` per unit of size."""
    return tuple(Timing(size=size, seconds=max(seconds * size, 1e-15), spread=0, samples=1) for size in sizes)


def machine(ranks: int = 8, per_byte: float = 0.0, overlap: Overlap | None = None, device: str = "cuda") -> Hardware:
    links = [
        Link(operation=operation, ranks=2, stride=1, nodes=1, timings=line(per_byte))
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
    ]
    return Hardware(
        **{"name": "made up", "device": device, "device_name": "none", "backend": "none", "ranks": ranks},
        **{"ranks_per_node": ranks, "memory_bytes": 10**9, "links": links, "overlap": overlap},
        matmuls=(Matmul(dtype="float32", timings=line(1e-12)),),
        copy=Curve(timings=line(1e-12)),
    )


def model(config: ViTConfig = CONFIG, ends: float = 0.0, device: str = "cuda") -> ModelProfile:
    """Return a profile with simple round figures for the layers.

    Per image, a block takes 1 s forward and 2 s backward, half of it for weight gradients. It saves 10 MB, or 1 MB
    under +ckpt, and has 3 MB of workspace. Embed and head take `ends` times as long.
    """
    layers = [
        LayerProfile(
            layer=kind,
            tensor=tensor,
            checkpoint=policy,
            wrapped=wrapped,
            forward=Curve(timings=line(times)),
            backward=Curve(timings=line((3 if policy == "full" else 2) * times)),
            input_share=0.5,
            saved=Bytes(fixed=0, per_row=(1 if policy == "full" else 10) * MB if kind == "block" else 0),
            workspace=Bytes(fixed=3 * MB if kind == "block" else 0, per_row=0),
        )
        for kind, times in (("embed", ends), ("block", 1.0), ("head", ends))
        for tensor in tensors(config, 8)
        for policy in CHECKPOINTS
        for wrapped in (False, True)
    ]
    weights = [
        WeightProfile(layer=kind, tensor=tensor, elements=1, gather=line(1e-15)[0], reduce=0)
        for kind in ("embed", "block", "head")
        for tensor in tensors(config, 8)
    ]
    return ModelProfile(
        **{"model": asdict(config), "device": device, "device_name": "none", "precision": "fp32", "compiled": False},
        **{"processes": 1, "layers": layers, "weights": weights, "microbatch": 0.0},
        optimizer=Curve(timings=line(1e-15)),
    )


def step(mesh: str, batch_size: int, costs: LayerCosts | None = None, **fields: object) -> Price:
    costs = costs or LayerCosts(CONFIG, machine(), model())
    return price(validate(replace(parse(mesh), **fields), costs.config, batch_size), costs, batch_size)


SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved1f1b", 2), ("zbvzerobubble", 2), ("interleavedzerobubble", 2))


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("microbatches", [4, 16])
def test_pipeline_idle_time_matches_theory(schedule: str, virtual: int, microbatches: int) -> None:
    """Stages are equal, links are free, and backward takes twice as long as forward."""
    found = step("pp4", 16, schedule=schedule, virtual_stages=virtual, microbatches=microbatches)
    busy = 3 * 16 * CONFIG.depth / 4
    theory = busy / (1 - idle_share(found.plan, microbatches))
    if schedule in ("gpipe", "1f1b"):
        assert theory == pytest.approx(busy * (microbatches + 3) / microbatches)
    # For the first stage, torch runs the full backward at the place of the weight gradients, so it may end later.
    late = 0.0 if schedule in ("gpipe", "1f1b", "interleaved1f1b") else 0.1
    assert theory * (1 - 1e-6) <= found.seconds <= theory * (1 + late + 1e-6)
    if not late:
        assert found.time["waiting"] == pytest.approx(theory - busy, abs=1e-6 * theory)


def test_data_parallelism_divides_the_time() -> None:
    """Links are free, so every way to split the batch divides the time. Recomputation costs one more forward."""
    assert step("dp1", 8).seconds == pytest.approx(3 * 8 * 8)
    for mesh in ("dp4", "fsdp4", "dp2xfsdp2", "dp4+zero1", "dp4+zero2"):
        assert step(mesh, 8).seconds == pytest.approx(3 * 8 * 2)
    assert step("dp4+ckpt", 8).seconds == pytest.approx(4 * 8 * 2)
    assert step("dp4", 16, microbatches=4).seconds == pytest.approx(3 * 8 * 4)


def test_uneven_stages_wait_for_the_slowest() -> None:
    assert step("pp2", 8, microbatches=8, split=(2, 6)).seconds == pytest.approx(3 * 6 * 8 + 3 * 2)


def test_memory_matches_a_calculation_by_hand() -> None:
    held = sum(layer_parameters(CONFIG, parse("dp1")).values()) * 4
    (alone,) = step("dp1", 4, microbatches=2).memory
    assert (alone.parameters, alone.optimizer, alone.gradients) == (held, 2 * held, held)
    assert alone.activations == 2 * 8 * 10 * MB and alone.workspace == 3 * MB
    (ckpt,) = step("dp1+ckpt", 4, microbatches=2).memory
    assert ckpt.activations == 2 * 8 * 1 * MB
    stages = step("pp4", 8, microbatches=8).memory
    # Under 1f1b, stage s keeps the activations of 4 - s micro-batches of 2 blocks, including the one being computed.
    assert [memory.activations for memory in stages] == [n * 2 * 10 * MB for n in (4, 3, 2, 1)]
    every = step("pp4", 8, microbatches=8, schedule="gpipe").memory
    assert all(memory.activations == 8 * 2 * 10 * MB for memory in every)
    shards = step("fsdp4", 4).memory[0]
    assert shards.parameters == pytest.approx(held / 4, rel=0.02) and shards.gathered > 0


def test_every_backward_of_zero2_has_unreduced_gradients() -> None:
    """Reduced gradients of earlier micro-batches are kept apart from those that the next backward computes."""
    held = sum(layer_parameters(CONFIG, parse("dp1")).values()) * 4
    (once,), (twice,) = (step("dp4+zero2", 4 * m, microbatches=m).memory for m in (1, 2))
    assert twice.activations == once.activations and twice.workspace == once.workspace
    assert twice.gradients == pytest.approx(once.gradients + held / 4, rel=0.02)
    (unsharded,) = step("dp4+zero1", 8, microbatches=2).memory
    assert twice.gradients < unsharded.gradients


@pytest.mark.parametrize(
    ("mesh", "schedule", "virtual"),
    [
        ("pp4xfsdp2+ckpt", "gpipe", 1),
        ("pp4: 0-2=dp2, 3-5=fsdp2, *=dp2+zero2", "1f1b", 1),
        ("pp2xdp2xtp2", "interleaved1f1b", 2),
        ("pp4xfsdp2+ckpt", "zbvzerobubble", 2),
        ("pp2xdp2xtp2", "interleavedzerobubble", 2),
        ("fsdp8", "1f1b", 1),
        ("dp8+zero1", "1f1b", 1),
    ],
)
def test_skipped_actions_do_not_change_the_memory_peak(
    mesh: str, schedule: str, virtual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk skips actions that an earlier one covers; visiting all of them gives the same bytes."""
    fields = {"schedule": schedule, "virtual_stages": virtual}
    for width in (64, 1024):  # activations dominate at 64, parameters and gradients at 1024
        config = replace(CONFIG, embed_dim=width, mlp_hidden_dim=4 * width)
        costs = LayerCosts(config, machine(), model(config))
        quick = step(mesh, 128, costs, microbatches=16, **fields).memory
        with monkeypatch.context() as patch:
            patch.setattr(_Walk, "_is_like_before", lambda walk, kind, number: False)
            assert step(mesh, 128, costs, microbatches=16, **fields).memory == quick


def test_overlapping_streams_slow_each_other_down() -> None:
    streams = Streams(Overlap(compute=1.5, communication=2.0))
    job = streams.send(1.0)
    streams.compute(1.0, "forward")  # takes 1.5 s, during which 0.75 s of sending completes
    assert streams.at == pytest.approx(1.5) and streams.left == pytest.approx(0.25)
    streams.wait(job, "gather")
    assert streams.at == pytest.approx(1.75) and dict(streams.spent) == pytest.approx({"forward": 1.5, "gather": 0.25})
    free = Streams(None)
    free.send(1.0)
    free.compute(3.0, "forward")
    assert free.at == 3.0 and free.left == 0


def test_overlap_takes_at_most_as_long_as_one_after_the_other() -> None:
    config = replace(CONFIG, depth=1)

    def computing(found: Overlap) -> tuple[float, Overlap | None]:
        """Return the seconds of 20 s of computing beside a transfer of 1 s, and the overlap of the costs."""
        costs = LayerCosts(config, machine(overlap=found, device="cpu"), model(config, device="cpu"))
        streams = Streams(costs.hardware.overlap)
        streams.send(1.0)
        streams.compute(20.0, "backward")
        assert streams.left == 0
        return streams.at, costs.hardware.overlap

    taken, found = computing(Overlap(compute=2.0, communication=4.0))
    assert taken == pytest.approx(21.0) and found == Overlap(compute=1.5, communication=3.0)
    apart = Overlap(compute=1.5, communication=2.0)  # 7/6 of the work in a second: some of the transfer is hidden
    taken, found = computing(apart)
    assert taken == pytest.approx(20 + 2 / 3) and found == apart


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_products_hide_sums_of_tensor_parallelism_in_backward(factor: float) -> None:
    """Only for as long as the product beside them takes, and not if a schedule computes it at another time."""
    per_byte, width, tokens = 6.5e-5, 64, 17
    overlap = None if factor == 1 else Overlap(compute=factor, communication=factor)
    costs = LayerCosts(CONFIG, machine(per_byte=per_byte, overlap=overlap), model())
    sent, head = per_byte * 4 * tokens * width, per_byte * 4 * (CONFIG.num_classes + width)
    flops = 2 * tokens * 12 * width**2 + 4 * tokens**2 * width
    # 2 s of backward compute two products for each in forward; those of weights hide a sum each.
    products = [2 * 2 * tokens * outputs * width**2 / (2 * flops) for outputs in (3, 4)]
    hidden = sum(min(product * factor, sent * factor) * (2 / factor - 1) for product in products)
    assert products[0] < sent < products[1]
    assert step("tp2", 1, costs).time["tensor"] == pytest.approx(8 * (4 * sent - hidden) + head)
    apart = step("pp2xtp2", 2, costs, schedule="zbvzerobubble", virtual_stages=2, microbatches=2)
    assert apart.time["tensor"] == pytest.approx(2 * (4 * 4 * sent + head))


def test_slowest_group_of_each_kind_is_priced() -> None:
    """A node of 6 ranks holds groups of 4 that are on it alone and others that are on two nodes."""
    crossing = RankGroup(4, 1, 2, here=2, share=1)  # the other group of the node does not use its network cards
    assert layer_groups(parse("dp3xtp4").strategy, (-1, 1), 6).j == crossing
    assert layer_groups(parse("tp4").strategy, (-1, 3), 6, 1).stage == crossing  # the second of three stages
    for stage in (0, 2, None):
        assert layer_groups(parse("tp4").strategy, (-1, 3), 6, stage).stage == RankGroup(4, 1, 1)
    assert layer_groups(parse("tp4").strategy, (-1, 1), 6).j == RankGroup(4, 1, 1)


def test_each_hop_of_a_pipeline_has_its_nodes() -> None:
    for mesh, nodes in (
        ("pp8", [1, 1, 1, 2, 1, 1, 1]),
        ("dp2xpp4", [1, 1, 1]),
        ("pp2xdp4", [2]),
        ("pp4xdp3", [2, 2, 2]),
    ):
        plan = parse(mesh)
        assert [hop(plan, a, b, 4)[0].nodes for a, b in pairwise(range(plan.pipeline_degree))] == nodes, mesh
        # Both stages of the middle hop of a V are on the last rank.
        assert hop(plan, plan.pipeline_degree - 1, plan.pipeline_degree - 1, 4)[0].alone


def test_unmeasured_group_sizes_are_extrapolated_as_a_ring() -> None:
    links = Links(machine(per_byte=1e-9))
    two = links.seconds("all_reduce", RankGroup(2, 1, 1), 10**9)
    assert two == pytest.approx(1.0)
    # A ring sends (n - 1)/n of the bytes: 3/4 instead of 1/2.
    assert links.seconds("all_reduce", RankGroup(4, 1, 1), 10**9) == pytest.approx(1.5)
    assert links.seconds("all_reduce", RankGroup(1, 1, 1), 10**9) == 0
