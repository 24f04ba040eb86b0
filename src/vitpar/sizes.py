"""Sizes in bytes, such as 24GB."""

import re

from vitpar.errors import UserError
from vitpar.limits import MAX_AMOUNT
from vitpar.text import shown

UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
"""Bytes of each unit, by its name in capitals."""


def parse_size(text: str, name: str = "--memory") -> float:
    """Return the bytes of `24GB`, `1.5GiB` or `500MB`. Raises UserError.

    name: option or setting that was given, for errors.
    """
    match = re.fullmatch(r"([0-9]{0,15}\.?[0-9]{1,15})\s*([A-Za-z]{1,3})", text.strip())
    if not match or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise UserError(f"{name} {shown(text)} is not a size: use a number and a unit, as in 24GB, 1.5GiB or 500MB")
    amount = float(match[1]) * UNITS[match[2].upper()]
    if amount > MAX_AMOUNT:
        raise UserError(f"{name} {text} is too large: use at most {MAX_AMOUNT:,}B")
    return amount
