"""Error bands of speeds that are estimated from data sheets, by the runs that resemble a prediction.

experiments/calibration.py predicts every run by constants that are fitted without it. The band of n runs is the error
of rank ⌈0.8 (n + 1)⌉, in full percent: it holds 80 % of further runs that are drawn like these.
"""

from __future__ import annotations

from typing import NamedTuple

from vitpar.models.config import ModelConfig
from vitpar.planner.profile.profiles import ModelProfile


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


def error_band(config: ModelConfig, model: ModelProfile, ranks: int, host_bound: bool) -> Band:
    """Return the band of a prediction for `ranks` devices: that of vitpar's runs if they resemble it.

    host_bound: whether a step takes as long as the host needs to launch it.
    """
    if model.compiled and ranks == 1 and model.device_name in MEASURED:
        return VITPAR if config.CALIBRATED and model.precision == "bf16" and not host_bound else OTHERS
    return BANDS[model.compiled, ranks > 1]
