"""Names of the ways to resize and crop images, without torch."""

from typing import Literal, get_args

Interpolation = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
"""Kernels that resize images, by Pillow's names and in the order of its numbers."""
PILLOW_KERNELS: tuple[str, ...] = get_args(Interpolation)
"""Name of each kernel by Pillow's number, which transformers' files contain."""
DEVICE_KERNELS: tuple[Interpolation, ...] = ("bicubic", "bilinear")
"""Kernels that also resize crops of images that their device augments."""
CropMode = Literal["center", "squash", "border"]
"""Ways to make an image square for evaluation, by timm's names."""
