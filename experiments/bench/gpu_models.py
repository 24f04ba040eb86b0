"""Models that are measured on one GPU: batch sizes by free memory, predictions and goals.

Imports no torch. The predictions are for bf16, compiled blocks and one H200. They were derived from the code, the
kernels that the compiler generates for sm_90, and arithmetic, assuming matrix products at 630 to 690 TFLOP/s, attention
at 220 TFLOP/s (197 tokens) or 170 TFLOP/s (257 tokens), and memory at 3.8 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
Batches = tuple[tuple[int, int], ...]
"""(GiB of free memory, batch size), the most memory first: for GPUs of 140 GB and of 80 GB."""
LARGE: Batches = ((120, 512), (70, 256))
MIDDLE: Batches = ((120, 256), (70, 128))
SMALL: Batches = ((120, 128), (70, 64))


@dataclass(frozen=True)
class GpuModel:
    """Batch sizes, predictions and goal of one model."""

    name: str
    """timm's name."""
    batches: Batches
    """Batch size by free memory."""
    predicted_batch: int
    """Batch size that `step_ms` is predicted for."""
    step_ms: float
    """Predicted milliseconds of a step."""
    mfu: float
    """Predicted MFU in percent."""
    mfu_range: tuple[float, float]
    """Expected range of the MFU in percent."""
    goal: float
    """MFU to reach, in percent."""
    peers: Batches
    """Batch size by free memory when several contenders are in memory at once."""


MODELS = {
    model.name: model
    for model in (
        GpuModel("vit_base_patch16_224", LARGE, 512, 122, 44.6, (40, 52), 45, MIDDLE),
        GpuModel("vit_large_patch16_224", MIDDLE, 256, 194, 49, (43, 56), 55, SMALL),
        GpuModel("vit_huge_patch14_224", SMALL, 128, 256, 51, (43, 56), 55, SMALL),
        GpuModel("vit_giant_patch14_224", SMALL, 128, 397, 52, (44, 57), 60, SMALL),
    )
}
FP8_GAIN = (5, 12)
"""Percent by which fp8 is predicted to shorten the step of H/14 and g/14."""
SETTINGS_GAIN = (1, 4)
"""Percent by which the best of the compiler's settings is predicted to shorten the step."""


def batch_for(name: str, free_bytes: int, *, peers: bool = False) -> int:
    """Return the batch size for the free memory: from the table, halved for each halving below its smallest entry."""
    model = MODELS.get(name)
    table = SMALL if model is None else model.peers if peers else model.batches
    for gibibytes, batch in table:
        if free_bytes >= gibibytes * GIB:
            return batch
    gibibytes, batch = table[-1]
    while free_bytes < gibibytes * GIB and batch > 1:
        gibibytes, batch = gibibytes / 2, batch // 2
    return batch


def predicted_step_ms(name: str, batch_size: int) -> float | None:
    """Return the predicted milliseconds of a step, scaled to the batch size; None for a model without prediction."""
    model = MODELS.get(name)
    return model and model.step_ms * batch_size / model.predicted_batch


def prediction(name: str, batch_size: int) -> str:
    """Return the prediction for a model as text."""
    model, milliseconds = MODELS.get(name), predicted_step_ms(name, batch_size)
    if model is None or milliseconds is None:
        return "none"
    low, high = model.mfu_range
    scaled = "" if batch_size == model.predicted_batch else f", from batch {model.predicted_batch}"
    return f"{milliseconds:.0f} ms, MFU {model.mfu:g} % ({low}–{high}){scaled}"
