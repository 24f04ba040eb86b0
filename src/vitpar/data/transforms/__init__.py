"""Transforms from decoded pixels to the input of a model.

Images stay uint8 until they are on the device, which is a quarter of the bytes of float32 to copy. They are normalised
and mixed with each other there.

Here are the names of the ways to resize and crop, without torch.
"""

from typing import Literal, get_args

Interpolation = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
"""Kernels that resize images, by Pillow's names and in the order of its numbers."""
PILLOW_KERNELS: tuple[str, ...] = get_args(Interpolation)
"""Name of each kernel by Pillow's number, which transformers' files contain."""
DEVICE_KERNELS: tuple[Interpolation, ...] = ("bicubic", "bilinear")
"""Kernels that also resize crops of images that their device augments."""
CropMode = Literal["center", "squash", "border"]
"""Ways to make an image square for evaluation, by timm's names."""
