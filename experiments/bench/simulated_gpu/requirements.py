"""Check for the packages that generate code for a simulated GPU. Imports no torch."""

from __future__ import annotations

import importlib.util

TRITON = "3.7.1"
"""Version of Triton that the CUDA build of torch 2.13 requires. The CPU build names none."""
WITHOUT_TRITON = f"there is no Triton to compile kernels: run pip install --no-deps triton=={TRITON}"


def has_triton() -> bool:
    """Return whether the package triton is installed."""
    return importlib.util.find_spec("triton") is not None
