"""The communication bytes in a price, compared with those a rank sends in a step."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from helpers.collectives import Sent
from helpers.ranks import RankPool
from helpers.text_models import TokenLoss, bert, t5
from vitpar import Execution, model_config, parallelize, parse, validate
from vitpar.models.config import ModelConfig
from vitpar.models.layers import zero_sides
from vitpar.models.lora import adapted
from vitpar.models.loss import CrossEntropy
from vitpar.planner.cost.elements import layer_elements
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.links import Links, RankGroup
from vitpar.planner.cost.price import price
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.curves import Curve, Timing
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.profile.profiles import Hardware, ModelProfile
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.strategy import Strategy
from vitpar.strategy.freezing import listed_parameters
from vitpar.training.optim.norms import global_norm
from vitpar.training.optim.optimizer import ShardedOptimizer

Ranks = Callable[[int], RankPool]
BATCH = 16
CONFIG = model_config(
    "vit_custom", patch_size=4, image_size=12, embed_dim=32, depth=3, num_heads=4, mlp_hidden_dim=64, num_classes=4
)
SWIN = model_config(
    "swin_custom",
    **{"patch_size": 2, "image_size": 8, "window_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (4, 4)},
    **{"mlp_ratio": 2.0, "num_classes": 4},
)
NOTHING = 1e-15


class Bytes(Links):
    """Links on which one operation takes one second per byte, and all others none."""

    def __init__(self, hardware: Hardware, operation: str) -> None:
        super().__init__(hardware)
        self._operation = operation

    def seconds(self, operation: str, group: RankGroup, size: float) -> float:
        return size if operation == self._operation and not group.alone else 0.0


def nothing(sizes: tuple[int, ...] = (1,)) -> tuple[Timing, ...]:
    return tuple(Timing(size=size, seconds=NOTHING, spread=0, samples=1) for size in sizes)


def priced(
    mesh: str, microbatches: int, operation: str, config: ModelConfig, frozen: frozenset[str] = frozenset()
) -> float:
    """Return the bytes of the complete tensors of all such operations in a step."""
    plan = validate(replace(parse(mesh), microbatches=microbatches), config, BATCH)
    hardware = find_cluster("4xA100").hardware().model_copy(update={"device": "cpu", "overlap": None})
    measured = estimate_model(config, "fp32", hardware, tensors(config, 4))
    free = {"forward": Curve(timings=nothing()), "backward": Curve(timings=nothing())}
    model = ModelProfile(
        **{**asdict_shallow(measured), "device": "cpu", "microbatch": 0.0},
        layers=tuple(layer.model_copy(update=free) for layer in measured.layers),
        weights=tuple(w.model_copy(update={"gather": nothing()[0], "reduce": 0.0}) for w in measured.weights),
        optimizer=Curve(timings=nothing()),
    )
    costs = LayerCosts(config, hardware, model, frozen)
    costs.links = Bytes(hardware, operation)
    return price(plan, costs, BATCH).seconds


def asdict_shallow(record: ModelProfile) -> dict:
    return {name: value for name, value in record if name not in ("layers", "weights", "optimizer")}


def sent(
    device: torch.device, mesh: str, microbatches: int, config: ModelConfig, frozen: frozenset[str] = frozenset()
) -> dict[str, int]:
    """Return the bytes a rank sends in its second step, by operation; runs on every rank."""
    plan = validate(replace(parse(mesh), microbatches=microbatches), config, BATCH)
    of_text = len(config.output_shape) > 1
    loss = TokenLoss() if of_text else CrossEntropy()
    model = parallelize(config, plan, Execution(BATCH, frozen=frozen), device, loss)
    optimizer = ShardedOptimizer(model.named_parameters(), OptimizerSection(), matrices=config.hidden_matrices)
    images = torch.randn(len(model.image_rows(BATCH)), *config.input.shape)
    labels = torch.zeros(BATCH, *config.output_shape[:-1], dtype=torch.int64)
    sides = zero_sides(config, BATCH, "cpu")
    images = images.long() if of_text else images
    keys = torch.zeros(BATCH, dtype=torch.int64)

    def step() -> None:
        model.forward_backward(images, labels, keys, **sides)
        global_norm(optimizer.gradients(), model)
        optimizer.step(1e-3)

    step()
    with Sent() as counted:
        step()
    return dict(counted.bytes)


MESHES = (
    *("dp4", "fsdp4", "dp2xfsdp2", "dp4+zero1", "dp4+zero2", "tp4", "tp4+sp", "tp4+2d", "tp2xfsdp2", "dp2xtp2+ckpt"),
)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("config", "microbatches"),
    [
        pytest.param(CONFIG, 1, marks=slow, id="vit-1"),
        pytest.param(CONFIG, 2, id="vit-2"),
        pytest.param(SWIN, 1, id="swin-1"),
        pytest.param(SWIN, 2, marks=slow, id="swin-2"),
    ],
)
@pytest.mark.parametrize("mesh", MESHES)
def test_priced_bytes_match_the_bytes_sent(config: ModelConfig, mesh: str, microbatches: int, ranks: Ranks) -> None:
    """The tolerance covers a loss and a norm of a few bytes.

    FSDP2 gathers the head once more with several micro-batches.
    """
    check_bytes(config, mesh, parse(mesh).strategy, microbatches, ranks)


@pytest.mark.parametrize(
    "mesh", ["pp1: stage1=fsdp4, *=tp2xfsdp2", "pp1: stage1=tp4+2d, *=tp4+sp", "pp1: 1-2=tp4, *=dp4"]
)
def test_priced_bytes_of_layerwise_plans_of_swin_match_the_bytes_sent(mesh: str, ranks: Ranks) -> None:
    """Redistribution between layers depends on the tokens and features at their boundary."""
    head = validate(parse(mesh), SWIN, BATCH).strategies(SWIN.layer_names)["head"]
    check_bytes(SWIN, mesh, head, 1, ranks)


WORDS = {"bert": bert(vocab_size=41), "t5": t5(vocab_size=43)}


@pytest.mark.parametrize("mesh", ["tp4", "tp4+sp", "fsdp2xtp2+sp", "dp2xtp2", "tp2xdp2+zero1+ckpt"])
@pytest.mark.parametrize("model", WORDS)
def test_priced_bytes_of_a_split_vocabulary_match_the_bytes_sent(model: str, mesh: str, ranks: Ranks) -> None:
    """The loss sends three numbers per token. Tables of T5 are never gathered, and summed once, over all ranks."""
    check_bytes(WORDS[model], mesh, parse(mesh).strategy, 2, ranks)


PROBE, MIDDLE, BITFIT = "embed, *", "embed, 0, 2", "embed, *, !*.bias"


@pytest.mark.parametrize("frozen", [pytest.param(PROBE, marks=slow, id="all but head"), MIDDLE, BITFIT])
@pytest.mark.parametrize("mesh", MESHES)
def test_priced_bytes_of_frozen_layers_match_the_bytes_sent(mesh: str, frozen: str, ranks: Ranks) -> None:
    """Frozen layers reduce nothing, and nothing is sent for a backward below the lowest trained layer."""
    check_bytes(CONFIG, mesh, parse(mesh).strategy, 1, ranks, frozen)


ADAPTERS = "embed, *, !*.lora_?.*"
"""Frozen parameters of a model with adapters by default: all but these and the head."""


@pytest.mark.parametrize("mesh", MESHES)
def test_priced_bytes_of_adapters_match_the_bytes_sent(mesh: str, ranks: Ranks) -> None:
    """Only adapters and the head are reduced; inside layers their few features are sent besides the others."""
    check_bytes(adapted(CONFIG, 6, 8.0), mesh, parse(mesh).strategy, 2, ranks, ADAPTERS)


@pytest.mark.parametrize(
    ("config", "mesh", "frozen"),
    [
        (adapted(SWIN, 2, 8.0, ("qkv", "fc2")), "pp1: stage1=tp4+2d, *=tp4+sp", ADAPTERS),
        (CONFIG, "pp1: embed=dp4, 0=tp4, 1=fsdp4, *=tp2xfsdp2", MIDDLE),
        (SWIN, "pp1: stage1=fsdp4, *=tp2xfsdp2", "embed, 0-1"),
        (SWIN, "pp1: stage1=tp4+2d, *=tp4+sp", "embed, 0, 3"),
    ],
)
def test_priced_bytes_of_frozen_layers_in_layerwise_plans_match_the_bytes_sent(
    config: ModelConfig, mesh: str, frozen: str, ranks: Ranks
) -> None:
    """Gradients of activations are only redistributed above the lowest trained layer."""
    head = validate(parse(mesh), config, BATCH).strategies(config.layer_names)["head"]
    check_bytes(config, mesh, head, 1, ranks, frozen)


def check_bytes(
    config: ModelConfig, mesh: str, of_head: Strategy, microbatches: int, ranks: Ranks, freeze: str = ""
) -> None:
    frozen = listed_parameters(freeze, config) if freeze else frozenset()
    (found, *_) = ranks(4).run(sent, mesh, microbatches, config, frozen)
    head = 4 * torch.float32.itemsize * layer_elements(config.layers["head"], of_head).local_numel
    for operation in ("all_gather", "reduce_scatter", "all_reduce"):
        more = head if operation == "all_gather" and microbatches > 1 else 0
        expected = priced(mesh, microbatches, operation, config, frozen)
        assert expected - 64 <= found.get(operation, 0) <= expected + more + 64, operation
