"""What every contender is given to train. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from vitpar.models import ViTConfig, model_config


@dataclass(frozen=True)
class Job:
    """One contender's work.

    contender: one of ``bench.peers.CONTENDERS``. model, options: as ``vitpar.models.model_config`` takes them.
    saving: whether memory matters more than time: whatever the contender has to save it is switched on.
    limit_bytes: a memory to pretend, of which parameters, gradients and AdamW's state must not take more; None for
    what there is.
    """

    contender: str
    model: str
    batch_size: int
    options: dict[str, int] = field(default_factory=dict)
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    compiled: bool = False
    saving: bool = False
    limit_bytes: int | None = None

    @property
    def config(self) -> ViTConfig:
        """The model's shape; initial values that recipes know, from which every parameter has a gradient: a wrong one
        shows."""
        return model_config(self.model, init="timm", **self.options)

    def to_json(self) -> str:
        """As a worker is told it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))
