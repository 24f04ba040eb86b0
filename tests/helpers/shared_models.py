"""Two small models whose layers share parameters: a tied first and last layer, and one table of all blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitpar
from vitpar.models.config import Rules
from vitpar.models.initial import PLAIN, normal
from vitpar.sharded import to_local

TOKENS = 12
MATRICES: Rules = (("*.matrix", normal(0.3)), ("*.bias", normal(0.1)), ("*.weight", normal(0.2)), *PLAIN)


@dataclass(frozen=True)
class Tied(vitpar.OwnModel):
    """A matrix [classes, width] that embeds patches, and scores classes."""

    image_size: int = 8
    channels: int = 3
    num_classes: int = 16
    depth: int = 4
    width: int = 24
    hidden: int = 32

    @property
    def shared(self) -> Mapping[str, str]:
        return {"head.matrix": "embed.matrix"}

    def initial_rules(self) -> Rules:
        return MATRICES

    def build_layer(self, name: str) -> vitpar.Layer:
        if name == "embed":
            return Patches(self.num_classes, self.width)
        return Scores(self.num_classes, self.width) if name == "head" else Hidden(self.width, self.hidden)


class Patches(vitpar.Layer):
    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.codes, self.matrix = nn.Linear(16, codes), nn.Parameter(torch.empty(codes, width))

    def forward(self, images: Tensor) -> Tensor:
        """images: [batch, 3, 8, 8] -> [batch, 12, width], a token for each patch of each colour."""
        patches = images.unfold(2, 4, 4).unfold(3, 4, 4).flatten(4).flatten(1, 3)
        return self.codes(patches).tanh() @ to_local(self.matrix)


class Scores(vitpar.Layer):
    # Behind pooled, every rank has all samples.
    TENSOR_PARALLEL: ClassVar[Mapping[str, str]] = {"pooled": "pooled", "matrix": "representation"}

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.pooled = nn.Identity()
        self.matrix = nn.Parameter(torch.empty(classes, width))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> [batch, classes]."""
        return self.pooled(x.tanh().mean(1)) @ to_local(self.matrix).T


class Hidden(vitpar.Layer):
    TENSOR_PARALLEL: ClassVar[Mapping[str, str]] = {"first": "column", "second": "row"}

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> the same shape."""
        return x + self.second(F.gelu(self.first(x)))


@dataclass(frozen=True)
class Relative(vitpar.OwnModel):
    """Attention with one table of relative positions for all blocks, as in T5."""

    image_size: int = 8
    channels: int = 3
    num_classes: int = 8
    depth: int = 4
    width: int = 24
    heads: int = 4

    @property
    def shared(self) -> Mapping[str, str]:
        return {f"blocks.{index}.table": "blocks.0.table" for index in range(1, self.depth)}

    def initial_rules(self) -> Rules:
        return (
            ("*.table", normal(0.5)),
            ("*.matrix", normal(0.3)),
            ("*.bias", normal(0.1)),
            ("*.weight", normal(0.2)),
            *PLAIN,
        )

    def build_layer(self, name: str) -> vitpar.Layer:
        if name == "embed":
            return Patches(16, self.width)
        return Classes(self.num_classes, self.width) if name == "head" else Attention(self.width, self.heads)


class Classes(vitpar.Layer):
    TENSOR_PARALLEL: ClassVar[Mapping[str, str]] = {"pooled": "pooled", "fc": "classifier"}

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.pooled, self.fc = nn.Identity(), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> [batch, classes]."""
        return self.fc(self.pooled(x.tanh().mean(1)))


class Attention(vitpar.Layer):
    TENSOR_PARALLEL: ClassVar[Mapping[str, str]] = {
        **{"query": "column", "key": "column", "value": "column", "proj": "row"},
        "table": "table",
    }

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.table = nn.Parameter(torch.empty(heads, 2 * TOKENS - 1))  # by distance
        self.heads, self.head_dim, self.first_head = heads, width // heads, 0

    def take_heads(self, index: int, parts: int) -> None:
        self.heads //= parts
        self.first_head = index * self.heads

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 12, width] -> the same shape."""
        q, k, v = (m(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in (self.query, self.key, self.value))
        places = torch.arange(TOKENS, device=x.device)
        distance = places[:, None] - places + TOKENS - 1
        bias = self.table[self.first_head : self.first_head + self.heads, distance]
        weights = (q @ k.mT / self.head_dim**0.5 + bias.to(q.dtype)).softmax(-1)
        return x + self.proj((weights @ v).transpose(1, 2).flatten(2))
