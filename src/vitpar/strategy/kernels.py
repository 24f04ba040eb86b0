"""Attention kernels that a recipe can name, by device type; ``vitpar.parallel.attention`` chooses among them."""

from __future__ import annotations

from vitpar.errors import RecipeError

ATTENTION_KERNELS = {"cuda": ("cudnn", "flash", "efficient", "packed", "math"), "cpu": ("flash", "math")}
"""Kernels by device type."""


def refuse_attention(wanted: str, device_type: str) -> None:
    """Raise RecipeError for a kernel that does not exist on devices of this type."""
    known = ATTENTION_KERNELS[device_type]
    if wanted not in ("auto", *known):
        raise RecipeError(
            f"train.attention '{wanted}' does not run on a {device_type} device: use auto, {' or '.join(known)}"
        )
