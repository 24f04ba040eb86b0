"""Models that are measured on one GPU: batch sizes by free memory, predictions and goals. Imports no torch.

The predictions are for bf16 and compiled blocks. They follow from the FLOPs and the kernels of a block, with matrix
products at 630 to 690 TFLOP/s, attention at 350 to 450 TFLOP/s of padded tiles, and memory at 4.1 TB/s on an H200 and
2.85 TB/s on an H100.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
PEAK = 989.4e12
"""Dense bf16 FLOP/s of an H100 or H200, which the MFU refers to."""
MFU_BAND = 3.0
"""Percent of MFU that a measurement may differ from its prediction."""
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
    peers: Batches
    """Batch size by free memory when several contenders are in memory at once."""
    gflops: float
    """GFLOPs of a training step on one image: matrix products of forward, times 3."""
    mfu: dict[str, float]
    """Predicted MFU in percent, by card."""
    goal: float
    """MFU to reach on an H200, in percent."""


MODELS = {
    model.name: model
    for model in (
        GpuModel("vit_base_patch16_224", LARGE, MIDDLE, 105.4, {"H200": 49.0, "H100": 46.0}, 45),
        GpuModel("vit_large_patch16_224", MIDDLE, SMALL, 369.3, {"H200": 52.0, "H100": 49.0}, 55),
        GpuModel("vit_huge_patch14_224", SMALL, SMALL, 1003.8, {"H200": 53.5, "H100": 50.5}, 55),
        GpuModel("vit_giant_patch14_224", SMALL, SMALL, 1602.0, {"H200": 54.7, "H100": 52.0}, 60),
    )
}


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


def card_of(device_name: str) -> str | None:
    """Return the card that a device's name is of, H100 or H200; None for another one."""
    return next((card for card in ("H200", "H100") if card in device_name), None)


def predicted_seconds(name: str, batch_size: int, card: str | None) -> float | None:
    """Return the predicted seconds of a step; None for a model or card without prediction."""
    model = MODELS.get(name)
    if model is None or card not in model.mfu:
        return None
    return 1e9 * model.gflops * batch_size / (model.mfu[card] / 100 * PEAK)


def prediction(name: str, batch_size: int, card: str | None) -> str:
    """Return the prediction for a model as text."""
    seconds = predicted_seconds(name, batch_size, card)
    if seconds is None or card is None:
        return "none"
    return f"{1e3 * seconds:.0f} ms, MFU {MODELS[name].mfu[card]:g} ± {MFU_BAND:g} %"
