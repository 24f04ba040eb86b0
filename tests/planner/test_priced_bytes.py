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


def frozen_by(freeze: str, config: ModelConfig) -> frozenset[str]:
    return listed_parameters(freeze, config) if freeze else frozenset()


def priced(mesh: str, microbatches: int, operation: str, config: ModelConfig, freeze: str) -> float:
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
    costs = LayerCosts(config, hardware, model, frozen_by(freeze, config))
    costs.links = Bytes(hardware, operation)
    return price(plan, costs, BATCH).seconds


def asdict_shallow(record: ModelProfile) -> dict:
    return {name: value for name, value in record if name not in ("layers", "weights", "optimizer")}


def sent(device: torch.device, config: ModelConfig, mesh: str, microbatches: int, freeze: str) -> dict[str, int]:
    """Return the bytes a rank sends in its second step, by operation; runs on every rank."""
    plan = validate(replace(parse(mesh), microbatches=microbatches), config, BATCH)
    of_text = len(config.output_shape) > 1
    loss = TokenLoss() if of_text else CrossEntropy()
    model = parallelize(config, plan, Execution(BATCH, frozen=frozen_by(freeze, config)), device, loss)
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


MIDDLE, BITFIT, PROBE = "embed, 0, 2", "embed, *, !*.bias", "embed, *"
ADAPTERS = "embed, *, !*.lora_?.*"
"""Frozen parameters of a model with adapters by default: all but these and the head."""
WORDS = {"bert": bert(vocab_size=41), "t5": t5(vocab_size=43)}
Case = tuple[ModelConfig, str, int, str]
"""A model, a plan, its micro-batches, and the frozen parameters."""
CASES: dict[str, list[Case]] = {
    "vit": [(CONFIG, mesh, 2, "") for mesh in MESHES],
    "one micro-batch": [(CONFIG, mesh, 1, "") for mesh in ("fsdp4", "dp2xfsdp2", "dp4+zero1", "tp4+2d")],
    # Redistribution between layers depends on the tokens and features at their boundary.
    "swin": [(SWIN, mesh, 1, "") for mesh in ("dp2xfsdp2", "pp1: stage1=fsdp4, *=tp2xfsdp2", "pp1: 1-2=tp4, *=dp4")],
    # The loss sends three numbers per token. Tables of T5 are never gathered, and summed once, over all ranks.
    "split vocabulary": [
        (WORDS["bert"], "tp4+sp", 2, ""),
        *((WORDS["t5"], mesh, 2, "") for mesh in ("tp4", "tp2xdp2+zero1+ckpt")),
    ],
    # Frozen layers reduce nothing, and nothing is sent for a backward below the lowest trained layer.
    "frozen": [
        *((CONFIG, mesh, 1, MIDDLE) for mesh in ("fsdp4", "dp4+zero2", "tp4+2d")),
        *((CONFIG, mesh, 1, BITFIT) for mesh in ("dp4+zero1", "tp4+sp", "tp2xfsdp2")),
        *((CONFIG, mesh, 1, PROBE) for mesh in ("dp2xfsdp2", "dp2xtp2+ckpt")),
        (CONFIG, "pp1: embed=dp4, 0=tp4, 1=fsdp4, *=tp2xfsdp2", 1, MIDDLE),
    ],
    # Only adapters and the head are reduced; inside layers their few features are sent besides the others.
    "adapters": [
        *((adapted(CONFIG, 6, 8.0), mesh, 2, ADAPTERS) for mesh in ("fsdp4", "tp4+sp")),
        (adapted(SWIN, 2, 8.0, ("qkv", "fc2")), "pp1: stage1=tp4+2d, *=tp4+sp", 1, ADAPTERS),
    ],
    "one of each": [
        (CONFIG, "dp4+zero2", 2, ""),
        (WORDS["t5"], "fsdp2xtp2+sp", 2, ""),
        (SWIN, "pp1: stage1=tp4+2d, *=tp4+sp", 1, "embed, 0, 3"),
    ],
}
QUICK = ("one of each",)


def sent_by(device: torch.device, cases: list[Case]) -> list[dict[str, int]]:
    """Return the bytes that a rank sends in the second step of each case; runs on every rank."""
    return [sent(device, *case) for case in cases]


@pytest.mark.each_row
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in CASES])
def test_priced_bytes_match_the_bytes_sent(kind: str, ranks: Ranks) -> None:
    """The tolerance covers a loss and a norm of a few bytes.

    FSDP2 gathers the head once more with several micro-batches.
    """
    (found, *_) = ranks(4).run(sent_by, CASES[kind])
    for (config, mesh, microbatches, freeze), bytes_sent in zip(CASES[kind], found, strict=True):
        of_head = validate(parse(mesh), config, BATCH).strategies(config.layer_names)["head"]
        head = 4 * torch.float32.itemsize * layer_elements(config.layers["head"], of_head).local_numel
        for operation in ("all_gather", "reduce_scatter", "all_reduce"):
            more = head if operation == "all_gather" and microbatches > 1 else 0
            expected = priced(mesh, microbatches, operation, config, freeze)
            sends = bytes_sent.get(operation, 0)
            assert expected - 64 <= sends <= expected + more + 64, (operation, config.name, mesh, freeze)
