"""Uncertainty of predicted step times: the spread of the timings behind them, or the error band of estimates.

The relative spread of a timing is half its interquartile range over its median. Every part of a step (`Price.time`) has
the spread of its timings, and the step has the mean of its parts, weighted by seconds; parts without timings, such as
waiting for a stage, are as uncertain as the others. Spreads are not combined in quadrature, because they are not
independent: a disturbance of some minutes affects all measurements of that time.
"""

from __future__ import annotations

import statistics
from typing import Any

from vitpar.planner.cost.layer import LayerCosts, tensor_name
from vitpar.planner.cost.price import Price
from vitpar.planner.profile.bands import OTHERS, VITPAR, Band, error_band
from vitpar.planner.profile.curves import Curve
from vitpar.planner.profile.profiles import Operation
from vitpar.strategy import batch_arithmetic

SENT: dict[str, tuple[Operation, ...]] = {
    "tensor": ("all_reduce", "all_gather", "reduce_scatter"),
    "gather": ("all_gather",),
    "gradients": ("all_reduce", "reduce_scatter"),
    "redistribution": ("all_to_all",),
}
"""Collectives that each communication part of a step can consist of."""


def uncertainty(price: Price, costs: LayerCosts) -> dict[str, Any] | None:
    """Return the uncertainty of a step's time; None if the profiles are measured, but without spreads.

    The step may take `share` of its time more or less. `source` says what that rests on, behind the share and a colon.
    """
    if costs.model.estimated:
        band = error_band(costs.config, costs.model, price.plan.world_size, _host_bound(price, costs))
        return {"share": band.share, "of": "estimates", "runs": band.runs, "source": band_source(band)}
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
    source = f"± {100 * share:.1f} %: spread of the timings in the profiles, weighted by their share of a step"
    return {"share": share, "of": "timings", "source": source} if share else None


def band_source(band: Band) -> str:
    """Return the error band of estimates and the runs that it rests on, in words."""
    words = f"{band}: error of {band.runs} {band.description}, each predicted without it"
    if band in (VITPAR, OTHERS):
        return f"{words}; none is from more than one GPU"
    return f"{words}; none is of vitpar ({VITPAR.runs} {VITPAR.description}, compiled: {VITPAR})"


def _host_bound(price: Price, costs: LayerCosts) -> bool:
    """Return whether the host needs as long for the blocks of a micro-batch as the device."""
    rows = batch_arithmetic(price.plan, price.batch_size).microbatch_rows
    blocks = {layer.kind for layer in costs.whole.block_kinds}
    curves = [layer.forward for layer in costs.model.layers if layer.layer in blocks and layer.tensor == "tp1"]
    return any(curve.seconds(rows) <= curve.seconds(1) for curve in curves)


def _median(curves: list[Curve]) -> float:
    """Return the median spread of all timings of the curves; 0 without timings."""
    return statistics.median([timing.spread for curve in curves for timing in curve.timings] or [0.0])


def _layer_spread(price: Price, costs: LayerCosts, direction: str) -> float:
    """Return the mean spread of the timings in one direction ("forward" or "backward") over the plan's layers."""
    rows = batch_arithmetic(price.plan, price.batch_size).microbatch_rows
    known = {(layer.layer, layer.tensor, str(layer.checkpoint)): layer for layer in costs.model.layers}
    spreads = []
    for name, strategy in price.plan.strategies(costs.config.layer_names).items():
        profile = known.get((costs.whole.layers[name].kind, tensor_name(strategy), strategy.checkpoint or "none"))
        if profile is not None:
            mine = rows / (strategy.degree("dp") * strategy.degree("fsdp"))
            timings = getattr(profile, direction).timings
            spreads.append(min(timings, key=lambda timing: abs(timing.size - mine)).spread)
    return statistics.fmean(spreads) if spreads else 0.0
