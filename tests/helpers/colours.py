"""Colours as colour-blind readers see them."""

import itertools
from collections.abc import Iterable

KINDS = ("normal", "protanopia", "deuteranopia")
"""Kinds of colour vision."""


def simulated(colour: str, kind: str) -> tuple[float, float, float]:
    """Return the colour in CIE Lab as seen with normal vision, protanopia or deuteranopia.

    The matrices, in linear RGB, come from Viénot, Brettel and Mollon, "Digital video colourmaps for checking the
    legibility of displays by dichromats", 1999.
    """
    matrices = {
        "protanopia": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
        "deuteranopia": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
    }
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    if kind in matrices:
        r, g, b = (min(1.0, max(0.0, x * r + y * g + z * b)) for x, y, z in matrices[kind])
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def closest(colours: Iterable[str], kind: str) -> tuple[float, str, str]:
    """Return the smallest distance of two colours, and these colours. Below 15 they look alike."""
    pairs = itertools.combinations(colours, 2)

    def apart(one: str, two: str) -> float:
        return sum((x - y) ** 2 for x, y in zip(simulated(one, kind), simulated(two, kind), strict=True)) ** 0.5

    return min((apart(one, two), one, two) for one, two in pairs)
