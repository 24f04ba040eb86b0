"""Linear layers that communicate in backward: the order of products and communication, and the gradients."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import group
from torch.profiler import profile

from helpers.ranks import Ranks
from vitpar.parallel.float8 import Fast, float8_fault
from vitpar.parallel.linear import column_linear, gathered_linear

ROWS, IN, OUT = 6, 32, 48
NAMES = {
    "_c10d_functional::all_gather_into_tensor": "gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional::all_reduce": "all-reduce",
    "_c10d_functional::wait_tensor": "wait",
    "aten::mm": "product",
    "aten::_scaled_mm": "product",
}


def integers(*shape: int) -> Tensor:
    """Return small integers, whose sums and products are exact in any order, also in float8."""
    return torch.randint(-2, 3, shape).float()


def inputs() -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    """Return the complete input [2, rows, in], and of all ranks: weights, biases, and gradients of outputs."""
    torch.manual_seed(3)
    weights, biases = [integers(OUT, IN) for _ in range(2)], [integers(OUT) for _ in range(2)]
    return integers(2, ROWS, IN), weights, biases, [integers(2, ROWS, OUT) for _ in range(2)]


def mine(x: Tensor, kind: str, rank: int) -> Tensor:
    """Return the part of a complete input, or of its gradient, on a rank."""
    return x if kind == "column" else x.chunk(2, dim=0 if kind == "batch" else -1)[rank].contiguous()


def forward(kind: str, in_float8: bool, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if kind == "column":
        return column_linear(x, weight, bias, group.WORLD, Fast() if in_float8 else None)
    return gathered_linear(x, weight, bias, 0 if kind == "batch" else -1, group.WORLD, Fast() if in_float8 else None)


def backward(
    device: torch.device, kind: str, *, in_float8: bool = False, compiled: bool = False, frozen: str = ""
) -> tuple[list[str], list[str]]:
    """Return names of products and communication of a backward in order, and the wrong gradients; on every rank."""
    rank = torch.distributed.get_rank()
    x, weights, biases, gradients = inputs()
    leaves = [mine(x, kind, rank).clone(), weights[rank], biases[rank]]
    # Not a leaf, as in a model: there a norm computes it.
    part, weight, bias = (leaf.requires_grad_(name not in frozen) for leaf, name in zip(leaves, "xwb", strict=True))
    function = torch.compile(forward, fullgraph=True) if compiled else forward
    y = function(kind, in_float8, part, weight, bias)
    with profile() as recorded:
        y.backward(gradients[rank])
    wanted = {
        "x": mine(sum(g @ w for g, w in zip(gradients, weights, strict=True)), kind, rank),
        "w": torch.einsum("bro,bri->oi", gradients[rank], x),
        "b": gradients[rank].sum((0, 1)),
    }
    found = dict(zip("xwb", (leaf.grad for leaf in leaves), strict=True))
    wrong = [n for n in wanted if not (found[n] is None if n in frozen else torch.equal(found[n], wanted[n]))]
    return order(recorded), wrong


def order(recorded: Any) -> list[str]:
    events = sorted(recorded.events(), key=lambda event: event.time_range.start)
    names = [NAMES[event.name] for event in events if event.name in NAMES]
    # On some CPUs a product in float8 calls one in float32.
    return [name for before, name in pairwise(["", *names]) if not before == name == "product"]


COLUMN = ["product", "all-reduce", "product", "wait"]
GATHERED = ["gather", "product", "reduce-scatter", "wait", "product", "wait"]


@pytest.mark.parametrize(
    ("kind", "in_float8", "compiled"),
    [
        *((kind, in_float8, False) for kind in ("column", "batch", "features") for in_float8 in (False, True)),
        pytest.param("column", False, True, marks=pytest.mark.slow),
        pytest.param("batch", True, True, marks=pytest.mark.slow),
    ],
)
def test_products_run_beside_communication(kind: str, in_float8: bool, compiled: bool, ranks: Ranks) -> None:
    if in_float8 and (fault := float8_fault(torch.device("cpu"))):
        pytest.skip(fault)
    for names, wrong in ranks(2).run(backward, kind, in_float8=in_float8, compiled=compiled):
        assert names == (COLUMN if kind == "column" else GATHERED)
        assert not wrong


@pytest.mark.parametrize(
    ("kind", "frozen", "expected"),
    [
        ("column", "wb", ["product", "all-reduce", "wait"]),
        ("column", "x", ["product"]),
        ("batch", "wb", ["product", "reduce-scatter", "wait"]),
        ("batch", "x", ["gather", "wait", "product"]),
    ],
)
def test_gradients_that_are_not_needed_send_nothing(kind: str, frozen: str, expected: list[str], ranks: Ranks) -> None:
    for names, wrong in ranks(2).run(backward, kind, frozen=frozen):
        assert names == expected
        assert not wrong
