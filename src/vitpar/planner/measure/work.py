"""The two kinds of work that rates are measured with: matrix products and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

Shape = tuple[int, int, int]
"""Of a product: rows, features that are summed over, columns."""


def products(device: torch.device, dtype: torch.dtype, shapes: Iterable[Shape]) -> Callable[[], None]:
    """Matrix products of these shapes, one after the other."""
    given = []
    for rows, inside, columns in shapes:
        a, b = (torch.randn(size, device=device).to(dtype) for size in ((rows, inside), (inside, columns)))
        given.append((a, b, a.new_empty(rows, columns)))

    def work() -> None:
        for a, b, out in given:
            torch.mm(a, b, out=out)

    return work


def copied(device: torch.device, size: int) -> Callable[[], object]:
    """A copy that reads and writes `size` bytes together."""
    source = torch.ones(size // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
