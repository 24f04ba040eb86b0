"""Batches to time steps with, when it does not matter what is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from vitpar.parallel import ParallelModel


def synthetic_batch(model: ParallelModel) -> tuple[Tensor | None, Tensor, Tensor]:
    """Random images on the device, labels and keys of a batch, as ``ParallelModel.forward_backward`` takes them."""
    c, size, device = model.config, model.batch_size, model.device
    images = None
    if model.takes_images:
        shape = (len(model.image_rows(size)), c.channels, c.image_size, c.image_size)
        images = torch.randn(shape, device=device).to(model.precision.compute)
    numbers = torch.arange(size, device=device)
    return images, numbers % c.num_classes, numbers
