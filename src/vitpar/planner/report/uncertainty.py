"""Uncertainty of predicted step times: the spread of the timings behind them, or the error band of estimates.

The relative spread of a timing is half its interquartile range over its median. Every part of a step (`Price.time`) has
the spread of its timings, and the step has the mean of its parts, weighted by seconds; parts without timings, such as
waiting for a stage, are as uncertain as the others. Spreads are not combined in quadrature, because they are not
independent: a disturbance of some minutes affects all measurements of that time.

The error bands of speeds that are estimated from data sheets come from the runs that resemble a prediction.
experiments/calibration.py predicts every run by constants that are fitted without it. The band of n runs is the error
of rank ⌈0.8 (n + 1)⌉, in full percent: it holds 80 % of further runs that are drawn like these.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from vitpar.planner.cost.layer import LayerCosts, tensor_name
from vitpar.planner.cost.price import Price
from vitpar.planner.profile.curves import Curve
from vitpar.planner.profile.profiles import Operation
from vitpar.strategy import batch_arithmetic


class Band(NamedTuple):
    """Error band, and the runs that it rests on."""

    share: float
    """Measured speeds are within this share of the predicted ones."""
    runs: int
    """Number of runs."""
    description: str
    """Source of the runs, in words."""

    def __str__(self) -> str:
        return f"± {100 * self.share:.0f} %"


VITPAR = Band(0.08, 9, "runs of vitpar on one H100 or H200")
"""Band of vitpar's compiled Vision Transformers in bf16 on one of MEASURED."""
OTHERS = Band(
    0.12, 6, "runs of vitpar on one H100 or H200 (MAE, BERT, T5, fp8, and small steps that wait for the host)"
)
"""Band of vitpar's other compiled steps there: of other models, in other precisions, or bound by the host."""
MEASURED = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
"""Devices of these runs."""
BANDS = {
    (True, False): Band(0.15, 5, "published runs of compiled PyTorch on one GPU"),
    (True, True): Band(0.30, 20, "published runs of compiled blocks on several GPUs"),
    (False, False): Band(0.08, 19, "published runs of eager PyTorch on one GPU (18 on an RTX 3090)"),
    (False, True): Band(0.29, 9, "published runs of eager blocks on several GPUs"),
}
"""Bands of runs by other code, by whether blocks are compiled and whether there are several devices."""


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
        band = _error_band(price, costs)
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


def _error_band(price: Price, costs: LayerCosts) -> Band:
    """Return the band of a prediction: that of vitpar's runs if they resemble it."""
    model, ranks = costs.model, price.plan.world_size
    if not (model.compiled and ranks == 1 and model.device_name in MEASURED):
        return BANDS[model.compiled, ranks > 1]
    rows = batch_arithmetic(price.plan, price.batch_size).microbatch_rows
    blocks = {layer.kind for layer in costs.whole.block_kinds}
    curves = [layer.forward for layer in model.layers if layer.layer in blocks and layer.tensor == "tp1"]
    # The time of one row is the host's: it needs as long for the blocks of a micro-batch as the device, or longer.
    host_bound = any(curve.seconds(rows) <= curve.seconds(1) for curve in curves)
    return VITPAR if costs.config.CALIBRATED and model.precision == "bf16" and not host_bound else OTHERS


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
            spreads.append(getattr(profile, direction).nearest(mine).spread)
    return statistics.fmean(spreads) if spreads else 0.0
