"""The two kinds of work that rates are measured with: matrix products and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from vitpar.parallel.float8 import E4M3, multiply, scaled_rows

Shape = tuple[int, int, int]
"""Of a product: rows, features that are summed over, columns."""


def products(
    device: torch.device, dtype: torch.dtype, shapes: Iterable[Shape], fast_sums: bool = True
) -> Callable[[], None]:
    """Matrix products of these shapes, one after the other; in float8 with a scale for each row and column.

    fast_sums: `fast` of ``vitpar.parallel.float8.multiply``.
    """
    works = [_product(device, dtype, shape, fast_sums) for shape in shapes]

    def work() -> None:
        for one in works:
            one()

    return work


def _product(device: torch.device, dtype: torch.dtype, shape: Shape, fast_sums: bool) -> Callable[[], object]:
    rows, inside, columns = shape
    if dtype is not E4M3:
        a, b = (torch.randn(size, device=device).to(dtype) for size in ((rows, inside), (inside, columns)))
        out = a.new_empty(rows, columns)
        return lambda: torch.mm(a, b, out=out)
    (a, of_a), (b, of_b) = (scaled_rows(torch.randn(count, inside, device=device)) for count in (rows, columns))
    return lambda: multiply(a, of_a, b, of_b, torch.bfloat16, fast_sums)


def copied(device: torch.device, size: int) -> Callable[[], object]:
    """A copy that reads and writes `size` bytes together."""
    source = torch.ones(size // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
