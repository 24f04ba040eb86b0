"""A standard PyTorch training step: autocast, backward, clip, fused AdamW."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.settings import BETAS, CLIP, EPS, LR, Step, decay_groups


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW with the settings of all contenders, fused: torch's fastest implementation on CPU and CUDA."""
    return torch.optim.AdamW(decay_groups(model), lr=LR, betas=BETAS, eps=EPS, fused=True)


def plain_step(model: nn.Module, compiled: bool, precision: str = "bf16") -> Step:
    """Return a step of `model`.

    compiled: whether to compile the complete model with ``torch.compile``. precision: bf16 (autocast) or fp32.
    """
    optimizer = adamw(model)
    forward = torch.compile(model) if compiled else model

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step
