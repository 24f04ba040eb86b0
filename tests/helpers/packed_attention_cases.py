"""Cases of packed attention (tests/parallel/test_packed_attention.py), for `helpers.interpreted`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from helpers.interpreted import run
from vitpar.kernels.attention import STEP, TILE, backward, forward
from vitpar.models import model_config
from vitpar.models.compiled import use_packed_attention
from vitpar.models.vit.attention import Attention

SHAPES = {
    "one token": (2, 1, 1, 16),
    "a step": (1, STEP, 2, 32),
    "a tile and one": (1, TILE + 1, 1, 64),
    "B/16": (2, 197, 2, 64),
    "H/14": (1, 257, 1, 80),
    "most": (1, 288, 1, 128),
}
"""Batch, tokens, heads and features of a head."""


def parts(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values as [batch, heads, tokens, features]."""
    return qkv.unflatten(2, (heads, 3, -1)).permute(3, 0, 2, 1, 4).unbind(0)


def by_formula(qkv: Tensor, heads: int) -> Tensor:
    q, k, v = parts(qkv, heads)
    weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
    return (weights @ v).transpose(1, 2).flatten(2)


def by_torch(qkv: Tensor, heads: int) -> Tensor:
    return scaled_dot_product_attention(*parts(qkv, heads)).transpose(1, 2).flatten(2)


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def kernel(name: str, dtype: torch.dtype, spread: float, device: str = "cpu") -> None:
    """Compare with the formula in float64: an error may be 1.2 times that of torch's attention in the same data type.

    spread: standard deviation of queries, keys and values; a large one makes weights of nearly 0 and 1.
    """
    batch, tokens, heads, features = SHAPES[name]
    draw = torch.Generator().manual_seed(0)
    shape = batch, tokens, heads * 3 * features
    qkv = (spread * torch.randn(shape, generator=draw)).to(device, dtype)
    gradient = torch.randn(batch, tokens, heads * features, generator=draw).to(device, dtype)
    out, logs = forward(qkv, heads)
    packed, sums = backward(gradient, qkv, out, logs)
    found = {"output": out, "gradient": packed, "sums": sums.sum(0)}
    reference: dict[str, dict[str, Tensor]] = {}
    for function, type_ in ((by_formula, torch.float64), (by_torch, dtype)):
        leaf = qkv.to(type_).requires_grad_()
        y = function(leaf, heads)
        (dx,) = torch.autograd.grad(y, leaf, gradient.to(type_))
        reference[function.__name__] = {"output": y.detach(), "gradient": dx, "sums": dx.double().sum((0, 1))}
    for what, exact in reference["by_formula"].items():
        allowed = 1.2 * distance(reference["by_torch"][what], exact) + 1e-6
        assert distance(found[what], exact) <= allowed, (what, distance(found[what], exact), allowed)
    assert torch.equal(packed, backward(gradient, qkv, out, logs)[0]), "it repeats"


def layer(compiled: bool, trained: bool) -> None:
    """Compare an attention layer with torch's kernel, for all gradients. trained: whether the bias of qkv is."""
    config = model_config("vit_custom", image_size=36, patch_size=4, embed_dim=64, depth=1, num_heads=2)
    attention = Attention(config)
    for n, p in enumerate(attention.parameters()):
        nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(n))
    attention.to(torch.bfloat16).qkv.bias.requires_grad_(trained)
    x = torch.randn(3, config.tokens, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    found = {}
    for packed in (False, True):
        use_packed_attention(packed)
        torch.compiler.reset()
        attend = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled and packed else attention
        leaf = x.clone().requires_grad_()
        y = attend(leaf)
        used = [p for p in (leaf, *attention.parameters()) if p.requires_grad]
        found[packed] = (y.detach(), *torch.autograd.grad(y.float().square().sum(), used))
    assert len(found[True]) == 5 + trained
    assert not all(map(torch.equal, found[True], found[False])), "the kernel computed nothing"
    for one, other in zip(found[True], found[False], strict=True):
        assert distance(one, other.double()) < 0.01
    with torch.no_grad():
        assert torch.equal(attention(x), found[False][0]), "evaluation does not pack"
    use_packed_attention(False)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each case and what it runs."""
    for name in SHAPES:
        yield name, partial(kernel, name, torch.bfloat16, 1.0)
    yield "fp16", partial(kernel, "B/16", torch.float16, 1.0)
    yield "sharp", partial(kernel, "B/16", torch.bfloat16, 5.0)
    yield "eager", partial(layer, False, True)
    yield "compiled", partial(layer, True, True)
    yield "compiled, frozen bias", partial(layer, True, False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(cases())
