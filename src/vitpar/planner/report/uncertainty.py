"""Uncertainty of predicted step times: the spread of the timings behind them, or the error of estimates.

Every part of a step (`Price.time`) has a relative spread: that of the timings it is made of, half the distance between
their quartiles over the median. Parts are weighed by their seconds and added up, not squared: what disturbs a machine
for minutes disturbs all that is measured in them.

| part                                     | timings                                                                |
|------------------------------------------|------------------------------------------------------------------------|
| forward, backward                        | of the plan's kinds of layers, at the size nearest to its micro-batch  |
| tensor, gather, gradients,               | of the operations that it may consist of: the median of all sizes and  |
| redistribution                           | groups                                                                 |
| optimizer                                | of the optimizer, the median of all sizes                              |
| the others, such as waiting for a stage  | the mean of the parts above                                            |
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from vitpar.planner.cost.layer import LayerCosts, tensor_name
from vitpar.planner.cost.price import Price, kind_of
from vitpar.planner.profile.profiles import Curve, LayerProfile, Operation
from vitpar.strategy import batch_arithmetic

SENT: dict[str, tuple[Operation, ...]] = {
    "tensor": ("all_reduce", "all_gather", "reduce_scatter"),
    "gather": ("all_gather",),
    "gradients": ("all_reduce", "reduce_scatter"),
    "redistribution": ("all_to_all",),
}
"""Operations of the parts of a step that are sent."""


@dataclass(frozen=True)
class Uncertainty:
    """How far a step may be from its prediction: `share` of it, more or less."""

    share: float
    estimated: bool
    """Whether it is the error of estimated times in their calibration, not a spread of measured ones."""

    def __str__(self) -> str:
        return f"± {self.share:.1%}".replace("%", " %")

    @property
    def source(self) -> str:
        """Origin of the uncertainty."""
        if self.estimated:
            return f"{self}: mean error of estimates on the runs they were calibrated on"
        return f"{self}: spread of the timings in the profiles, weighted by their share of a step"

    def covers(self, price: Price, other: Price) -> bool:
        """Whether the two are too close together to say which is faster."""
        return abs(price.images_per_second / other.images_per_second - 1) < self.share


def uncertainty(price: Price, costs: LayerCosts) -> Uncertainty | None:
    """The uncertainty of a step's seconds; None where the profiles hold no spread (estimates, imported profiles)."""
    if costs.model.error_band is not None:
        return Uncertainty(costs.model.error_band, estimated=True)
    spreads = {
        "forward": _layer_spread(price, costs, "forward"),
        "backward": _layer_spread(price, costs, "backward"),
        "optimizer": _median([costs.model.optimizer]),
        **{
            part: _median([link for link in costs.hardware.links if link.operation in operations])
            for part, operations in SENT.items()
        },
    }
    known = {part: seconds for part, seconds in price.time.items() if part in spreads and seconds > 0}
    share = sum(spreads[part] * seconds for part, seconds in known.items()) / sum(known.values())
    return Uncertainty(share, estimated=False) if share else None


def _median(curves: list[Curve]) -> float:
    return statistics.median([timing.spread for curve in curves for timing in curve.timings] or [0.0])


def _layer_spread(price: Price, costs: LayerCosts, direction: str) -> float:
    """The mean over the plan's kinds of layers, weighed by their number."""
    rows = batch_arithmetic(price.plan, price.batch_size).microbatch_rows
    found = []
    for profile, data in _profiles(price, costs):
        timings = getattr(profile, direction).timings
        found.append(min(timings, key=lambda timing: abs(timing.size - rows / data)).spread)
    return statistics.fmean(found) if found else 0.0


def _profiles(price: Price, costs: LayerCosts) -> Iterator[tuple[LayerProfile, int]]:
    """Every layer's profile, and how many parts of the batch its ranks work on."""
    known: dict[tuple[str, str, str], LayerProfile] = {
        (layer.layer, layer.tensor, layer.checkpoint): layer for layer in costs.model.layers
    }
    for name, strategy in price.plan.strategies(costs.config.layer_names).items():
        profile = known.get((kind_of(name), tensor_name(strategy), strategy.checkpoint or "none"))
        if profile is not None:
            yield profile, strategy.degree("dp") * strategy.degree("fsdp")
