"""Weights with a class token for a model that averages tokens, as masked autoencoders are fine-tuned (2111.06377)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vitpar.models.config import ModelConfig
from vitpar.models.rows import Adapted, MadeTensor
from vitpar.models.vit.config import ViTConfig


def averaging(config: ViTConfig, there: ModelConfig) -> Adapted | None:
    """Return weights of `there` for `config`, which has a register where they have a class token; None otherwise.

    With `fc_norm` the means are normalised by a new norm.
    """
    if not isinstance(there, ViTConfig) or there.distillation or (there.pool, config.pool) != ("cls", "avg"):
        return None
    if config.num_reg_tokens != there.num_reg_tokens + 1:
        return None
    names = ("embed.cls_token", *(["embed.reg_token"] if there.num_reg_tokens else []))
    made = replace(there, pool="avg", num_reg_tokens=config.num_reg_tokens, fc_norm=config.fc_norm)
    kept = ("head.norm.weight", "head.norm.bias") if config.fc_norm else ()
    change = "the class token becomes a register, and tokens are averaged"
    return Adapted(made, {"embed.reg_token": MadeTensor(names, _joined)}, change, kept)


def _joined(*tokens: Tensor) -> Tensor:
    return torch.cat(tokens, 1)
