"""Layers that models share."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._logging._internal import warning_once

from vitpar import model_config
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


def block(dtype: torch.dtype, **options: Any) -> Any:
    """Return the second block of a small model, with biases that matter."""
    config = model_config("vit_nano_patch4_16", num_classes=10, depth=2, **options)
    torch.manual_seed(0)
    layer: Any = config.build_layer("blocks.1")
    layer.reset_buffers()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=0.5 if parameter.dim() == 1 else 0, std=0.1)
    return layer.to(dtype)


def results(forward: Any, layer: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return the output and the gradients of input and parameters; zeros for those of frozen parameters."""
    layer.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    y = forward(x, torch.arange(len(x)))
    y.backward(gradient)
    found = [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [torch.zeros(1) if one is None else one for one in found]


@pytest.mark.parametrize(
    ("options", "frozen", "dtype", "rearranged"),
    [
        ({}, "", torch.float64, True),
        ({}, "", torch.bfloat16, True),
        ({"drop_path": 0.5}, "", torch.float64, True),
        ({"drop_path": 0.5}, "", torch.bfloat16, True),
        ({}, "x attn.qkv.bias attn.proj.bias mlp.fc2.bias", torch.float64, True),
        ({}, "x attn.qkv.weight attn.proj.weight mlp.fc2.weight norm1.weight norm1.bias", torch.float64, True),
        ({"layer_scale": 0.1}, "", torch.float64, False),
        ({"drop_path": 0.5, "dropout": 0.1}, "", torch.float64, False),
        ({"qkv_bias": "none"}, "", torch.float64, True),
    ],
)
def test_compiled_block_equals_an_uncompiled_one(
    options: dict[str, Any], frozen: str, dtype: torch.dtype, rearranged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled, a block sums for biases elsewhere and adds its last product in place (vitpar.models.compiled)."""
    torch.compiler.reset()
    warning_once.cache_clear()
    exact, layer, graphs = block(torch.float64, **options), block(dtype, **options), AotEagerAndRecordGraphs()
    exact.load_state_dict(layer.state_dict())
    for name in set(frozen.split()) - {"x"}:
        exact.get_parameter(name).requires_grad_(False)
        layer.get_parameter(name).requires_grad_(False)
    x, gradient = torch.randn(2, 8, 5, exact.width).to(dtype)
    x.requires_grad_("x" not in frozen)
    compiled = torch.compile(layer.forward, backend=graphs, fullgraph=True)
    found, plain = (results(forward, layer, x, gradient) for forward in (compiled, layer))
    assert ("add_product_" in graphs.fw_graphs[0].code) is rearranged
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    for mine, rounded, right in zip(found, plain, results(exact, exact, x.double(), gradient.double()), strict=True):
        error, usual = ((one - right).norm() / right.norm() if right.any() else one.norm() for one in (mine, rounded))
        assert error <= 1e-12 + 2 * usual and usual < 0.05
