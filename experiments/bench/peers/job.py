"""Training job of a contender. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from vitpar.models import model_config
from vitpar.models.config import ModelConfig


@dataclass(frozen=True)
class Job:
    """Training job of one contender."""

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

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model.

        Its initial values are available in recipes and give every parameter a gradient, so that wrong gradients show.
        """
        return model_config(self.model, init="timm", **self.options)

    def to_json(self) -> str:
        """Return the job as JSON for a worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that `to_json` wrote."""
        return cls(**json.loads(text))
