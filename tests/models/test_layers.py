"""Layers that models share."""

import pytest
import torch
from torch import nn

from vitpar.models.layers import LayerNorm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_norm_are_accurate_for_many_tokens(dtype: torch.dtype) -> None:
    """torch's own are off by a fifth: tokens are added to a sum of the same few bits."""
    torch.manual_seed(0)
    x, gradient = torch.randn(16, 512, 8), torch.randn(16, 512, 8) / 10 + 0.02
    x, gradient = x.to(dtype), gradient.to(dtype)
    ours, theirs = LayerNorm(8), nn.LayerNorm(8).double()
    ours.to(dtype)(x).backward(gradient)
    theirs(x.double()).backward(gradient.double())
    for mine, exact in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad - exact.grad).norm() <= 0.01 * exact.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_equals_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs, x = LayerNorm(8, eps=0.1).to(dtype), nn.LayerNorm(8, eps=0.1).to(dtype), torch.randn(4, 8).to(dtype)
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.copy_(mine.copy_(torch.randn(8)))
    limit = 0.02 if dtype is torch.bfloat16 else 0.0
    torch.testing.assert_close(ours(x), theirs(x), rtol=limit, atol=limit)
