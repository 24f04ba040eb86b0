"""Work that every contender is given. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from vitpar.models import ViTConfig, model_config


@dataclass(frozen=True)
class Job:
    """Work of one contender."""

    contender: str
    """One of ``bench.peers.CONTENDERS``."""
    model: str
    """Name of the model, as ``vitpar.models.model_config`` takes it."""
    batch_size: int
    options: dict[str, int] = field(default_factory=dict)
    """Options of the model, as ``vitpar.models.model_config`` takes them."""
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    compiled: bool = False
    saving: bool = False
    """Whether memory matters more than time: all memory savings of the contender are switched on."""
    limit_bytes: int | None = None
    """Memory to pretend, which parameters, gradients and AdamW's state must not exceed; None for the actual memory."""

    @property
    def config(self) -> ViTConfig:
        """The model's shape; initial values that recipes know, from which every parameter has a gradient: a wrong one
        shows."""
        return model_config(self.model, init="timm", **self.options)

    def to_json(self) -> str:
        """Return the job as JSON for a worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))
