"""Pieces of the sentences that refuse a strategy: counts, alternatives and the values closest to a wrong one."""

from __future__ import annotations

import math
from collections.abc import Iterable


def count(number: int, noun: str) -> str:
    """`1 rank`, `4 ranks`, `2 micro-batches`, `3 strategies`."""
    plural = noun[:-1] + "ies" if noun.endswith("gy") else noun + ("es" if noun.endswith(("ch", "s")) else "s")
    return f"{number} {noun if number == 1 else plural}"


def size(number: float) -> str:
    """`31.2 GB`, `640 MB`, `0.12 MB`: bytes."""
    unit, scale = ("GB", 1e9) if number >= 1e9 else ("MB", 1e6)
    return f"{number / scale:.3g} {unit}"


def either(options: Iterable[object]) -> str:
    """`2`, `2 or 3`, `2, 3 or 6`."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def ranks(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 and 2`, `ranks 0-2, 5 and 7`."""
    parts: list[str] = []
    run: list[int] = []
    ordered = sorted(numbers)
    for number, following in zip(ordered, [*ordered[1:], None], strict=True):
        run.append(number)
        if following != number + 1:
            parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
            run = []
    *others, last = parts
    noun = "rank" if len(ordered) == 1 else "ranks"
    return f"{noun} {', '.join(others)} and {last}" if others else f"{noun} {last}"


def closest(values: Iterable[int], wanted: int, most: int = 3) -> list[int]:
    """Up to `most` of `values` that are nearest to `wanted`, in ascending order."""
    return sorted(sorted(values, key=lambda value: abs(value - wanted))[:most])


def divisors(number: int) -> list[int]:
    """Every divisor of `number` (1 or more), in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
