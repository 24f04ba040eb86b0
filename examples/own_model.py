"""A model of your own: MLP-Mixer (arXiv 2105.01601), which vitpar trains under any plan.

vitpar train --model examples/own_model.py:Mixer --mesh pp2xtp2 --data DIR
vitpar check --model examples/own_model.py:Mixer --mesh "pp2: 0-3=tp2, *=fsdp2"
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

import vitpar


class Patches(vitpar.Layer):
    """Cut images [batch, channels, height, width] into patches: tokens [batch, tokens, width]."""

    def __init__(self, config: "Mixer") -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.channels, config.width, config.patch_size, config.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2).contiguous()


class MixerBlock(vitpar.Layer):
    """Mix tokens, then features: [batch, tokens, width] -> the same shape."""

    # Pairs of linear layers that tensor parallelism splits; every rank computes the rest.
    TENSOR_PARALLEL: ClassVar = {
        "tokens_in": "column",
        "tokens_out": "row",
        "features_in": "column",
        "features_out": "row",
    }

    def __init__(self, config: "Mixer") -> None:
        super().__init__()
        tokens = (config.image_size // config.patch_size) ** 2
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.tokens_in, self.tokens_out = nn.Linear(tokens, config.width // 2), nn.Linear(config.width // 2, tokens)
        self.features_in = nn.Linear(config.width, 4 * config.width)
        self.features_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.tokens_out(F.gelu(self.tokens_in(self.norm1(x).transpose(1, 2))))
        x = x + mixed.transpose(1, 2)
        return x + self.features_out(F.gelu(self.features_in(self.norm2(x))))


class Classifier(vitpar.Layer):
    """Mean over the tokens, then classes: [batch, tokens, width] -> [batch, classes]."""

    TENSOR_PARALLEL: ClassVar = {"pooled": "pooled", "fc": "classifier"}

    def __init__(self, config: "Mixer") -> None:
        super().__init__()
        self.norm, self.pooled, self.fc = (
            nn.LayerNorm(config.width),
            nn.Identity(),
            nn.Linear(config.width, config.num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pooled(self.norm(x).mean(dim=1)))


@dataclass(frozen=True)
class Mixer(vitpar.OwnModel):
    """MLP-Mixer; its fields are set by --set model.options.width=128."""

    image_size: int = 32
    patch_size: int = 4
    width: int = 64
    depth: int = 8

    def build_layer(self, name: str) -> vitpar.Layer:
        return Patches(self) if name == "embed" else Classifier(self) if name == "head" else MixerBlock(self)
