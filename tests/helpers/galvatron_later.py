"""Galvatron's cost model of version 2.4.0 without a pipeline, with its constants for 8 A100 in bf16.

What the embeddings cost is the same under every plan, so it is left out. With a pipeline the cost model only looks at
the first and the last stage, so that plans with few blocks in these are too cheap; it is not used here. Times are in
ms, sizes in MB of 2**20 bytes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from helpers.galvatron_cost import CostModel, LayerType, overlapped
from vitpar.models import model_config
from vitpar.strategy import Strategy

OVERLAP = 1.125552573612729
BANDWIDTH = {
    8: 154.203,
    4: 155.815,
    2: 151.344,
}  # MB per ms of an all-reduce among neighbours, or distant ranks if fewer
TENSOR = {2: 138.156, 4: 159.119, 8: 154.203}  # MB per ms of an all-reduce among neighbours
GATHER = {2: 1.3887 / 2, 4: 3.7352 / 2, 8: 8.1409 / 2}  # ms of an all-gather of 256, 512, 1024 MB among neighbours


@dataclass(frozen=True)
class LaterCostModel(CostModel):
    """The later cost model with the constants of one model."""

    fixed: tuple[tuple[str, float], ...] = ()
    """ms of a forward of any size, by kind of blocks."""
    recomputed: float = 0.0
    """MB of activations per sample with checkpointing."""
    microbatches: int = 1
    """Micro-batches of a step."""
    least_tp: int = 1
    """Least degree of tp, that of the embeddings."""
    tensor_ms: Callable[[int, float], float] = lambda tp, size: 0.0
    """Function (degree of tp, MB of an activation) that gives the ms of a layer's communication along tp."""
    roles: ClassVar[tuple[str, ...]] = ("dp", "fsdp", "tp")
    flags: ClassVar[tuple[str, ...]] = ("zero2", "ckpt")

    def knows(self, pp: int, strategy: Strategy) -> bool:
        sharded = not strategy.has("dp") or strategy.zero == 2
        return super().knows(pp, strategy) and sharded and strategy.degree("tp") >= self.least_tp

    def layer_ms(self, kind: str, pp: int, strategy: Strategy, batch_size: int) -> float:
        if kind not in self.types:
            return 0.0
        layer, tp, data = self.types[kind], strategy.degree("tp"), strategy.degree("dp") * strategy.degree("fsdp")
        samples, again = batch_size / self.microbatches / data, bool(strategy.checkpoint)
        forward = layer.forward * samples / tp + dict(self.fixed).get(kind, 0.0)
        backward = (2 + again) * forward
        message = rate = tensor = 0.0
        if tp > 1:
            tensor = self.tensor_ms(tp, samples * layer.activation) * (1.5 if again else 1.0)
        if data > 1:
            message, rate = (data - 1) / data * layer.parameters / tp, 1 / BANDWIDTH[data]
        share = 0.5 if tp > 1 and data > 1 and tp >= tp * data // 2 else 1.0
        exposed = overlapped(message, rate, share * backward, OVERLAP) - share * backward
        gathering = message * rate / 2 * strategy.has("fsdp")
        # Gradients are reduced once, in the last micro-batch.
        return self.microbatches * (forward + backward + tensor + gathering) + exposed

    def move_ms(self, pp: int, before: Strategy, behind: Strategy, batch_size: int) -> float:
        return 0.0

    def layer_mb(self, kind: str, strategy: Strategy, batch_size: int) -> int:
        if kind not in self.types:
            return 0
        layer, tp, data = self.types[kind], strategy.degree("tp"), strategy.degree("dp") * strategy.degree("fsdp")
        part, kept, several = 1 / data + 0.003, 1.0, self.microbatches > 1
        if strategy.has("fsdp"):
            kept = 7 / 8 * part + 1 / 8 if several else part
        elif strategy.has("dp"):
            kept = 6 / 8 * part + 2 / 8 if several else 7 / 8 * part + 1 / 8
        # The first micro-batch is the largest.
        local = batch_size * self.least_tp // 8
        samples = math.ceil(local / self.microbatches) / local * batch_size / data
        saved = self.recomputed / tp if strategy.checkpoint else layer.saved[tp]
        return math.ceil(4 * layer.parameters / tp * kept + saved * samples)

    def other_mb(self, pp: int, batch_size: int) -> int:
        return 0


def _none(samples: float, pp: int, strategy: Strategy) -> float:
    return 1


def _gathers(tp: int, size: float) -> float:
    assert size == 128 * tp, "the times of other sizes are not known"
    return 4 * GATHER[tp]


def _all_reduces(tp: int, size: float) -> float:
    # The activation is in 16 bits.
    return 2 * (tp - 1) / tp * 4 * size / TENSOR[tp]


@cache
def later_t5_3b() -> LaterCostModel:
    """Return the cost model of T5-3B for batches of 1024."""
    types = {
        "encoder": LayerType(
            192.107421875, _saved(52.4619140625, 27.96728515625, 14.255126953125, 7.2208251953125), 0.31596382, 1
        ),
        "decoder": LayerType(
            258.19140625, _saved(71.638671875, 39.228515625, 19.7431640625, 9.98486328125), 0.40117591, 1
        ),
    }
    fixed = ("encoder", 0.84547904), ("decoder", 1.5197021)
    return LaterCostModel(model_config("t5_3b"), types, 0, 0, _none, fixed=fixed, recomputed=1.0, tensor_ms=_gathers)


@cache
def later_bert_large() -> LaterCostModel:
    saved = _saved(95.8922119140625, 47.94610595703125, 23.973052978515625, 11.986526489257812)
    types = {"block": LayerType(40.8896484375, saved, 1.84288009, 1)}
    return LaterCostModel(
        model_config("bert_large"), types, 0, 0, _none,
        recomputed=2.273681640625, microbatches=3, least_tp=2, tensor_ms=_all_reduces,
    )  # fmt: skip


def _saved(*megabytes: float) -> dict[int, float]:
    return dict(zip((1, 2, 4, 8), megabytes, strict=True))
