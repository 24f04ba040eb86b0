"""A model without vitpar's parallel layers, and a standard PyTorch training step: backward, clip, fused AdamW."""

from collections.abc import Collection

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.settings import BETAS, CLIP, EPS, LR, SEED, Step, decay_groups
from vitpar.models.config import ModelConfig
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel


def initial_model(config: ModelConfig, device: str = "cpu", layers: Collection[str] | None = None) -> LayeredModel:
    """Return a model without vitpar's parallel layers, with vitpar's initial parameters in float32.

    layers: names of those that it has; None for all.
    """
    with torch.device("meta"):
        model = LayeredModel(config, layers)
    model.to_empty(device=device)
    initialise(model, SEED, config)
    return model


def adamw(groups: list[dict]) -> torch.optim.AdamW:
    """Return AdamW with the settings of all contenders, fused: torch's fastest implementation on CPU and CUDA."""
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def plain_step(model: nn.Module, compiled: bool = False, precision: str = "fp32") -> Step:
    """Return a step of `model`, which may be wrapped for data parallelism.

    compiled: whether to compile the complete model with ``torch.compile``. precision: bf16 (autocast) or fp32.
    """
    optimizer = adamw(decay_groups(model))
    forward = torch.compile(model) if compiled else model
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() / ranks, norm.full_tensor() if isinstance(norm, DTensor) else norm

    return step
