"""Numeric precisions: what parameters are kept in, what is computed in, what gradients are reduced in.

| precision | parameters and optimizer | compute and activations | gradient reduction |
|-----------|--------------------------|-------------------------|--------------------|
| fp64      | float64                  | float64                 | float64            |
| fp32      | float32                  | float32                 | float32            |
| bf16      | float32                  | bfloat16                | float32            |
"""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from vitpar.errors import RecipeError


@dataclass(frozen=True)
class Precision:
    """One row of the table above."""

    parameters: torch.dtype
    compute: torch.dtype

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The same, as FSDP2 takes it."""
        if self.compute is self.parameters:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.parameters)


PRECISIONS = {
    "fp64": Precision(torch.float64, torch.float64),
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
}


def precision(name: str) -> Precision:
    """The precision called `name`. Raises RecipeError for an unknown one."""
    if name not in PRECISIONS:
        raise RecipeError(f"unknown precision '{name}': use {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
