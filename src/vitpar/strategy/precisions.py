"""Data types of each precision, without torch: plans, prices and memory need their names and sizes.

``vitpar.parallel.precision`` says what they are for, and makes torch's types of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataType:
    """A floating-point data type."""

    name: str
    """Name in torch, such as bfloat16."""
    itemsize: int
    """Bytes of an element."""


@dataclass(frozen=True)
class PrecisionTypes:
    """Data types of one precision."""

    parameters: DataType
    """Data type of parameters and optimizer state."""
    compute: DataType
    """Data type of compute and activations."""
    reduce: DataType
    """Data type in which gradients are summed over data-parallel ranks."""
    float8: bool = False
    """Whether the linear layers of blocks multiply in float8."""


_FLOAT64, _FLOAT32 = DataType("float64", 8), DataType("float32", 4)
_BFLOAT16, _FLOAT16 = DataType("bfloat16", 2), DataType("float16", 2)
PRECISION_TYPES = {
    "fp64": PrecisionTypes(_FLOAT64, _FLOAT64, _FLOAT64),
    "fp32": PrecisionTypes(_FLOAT32, _FLOAT32, _FLOAT32),
    "bf16": PrecisionTypes(_FLOAT32, _BFLOAT16, _FLOAT32),
    "fp16": PrecisionTypes(_FLOAT32, _FLOAT16, _FLOAT32),
    "fp8": PrecisionTypes(_FLOAT32, _BFLOAT16, _FLOAT32, float8=True),
}
"""Data types by the name of the precision."""
