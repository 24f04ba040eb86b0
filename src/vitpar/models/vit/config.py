"""The shape of a Vision Transformer and the names it goes by, without importing torch (planning needs no tensors).

Names and sizes are timm's; the widths of giant, gigantic and 22B are those of "Scaling Vision Transformers"
(arXiv 2106.04560) and "Scaling Vision Transformers to 22 Billion Parameters" (arXiv 2302.05442).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from vitpar.errors import ModelError
from vitpar.models.config import ModelConfig, Rules, check_ranges, check_tokens, from_torch_module
from vitpar.models.description import AttentionShape, LayerDescription, Part, Shape, linear, norm, parameter
from vitpar.text import shown

if TYPE_CHECKING:
    from torch import nn

_WORDS = {
    "pool": ("cls", "avg"),
    "position": ("learned", "sincos2d"),
    "init": ("jax", "timm", "moco", "perturbed"),
}


@dataclass(frozen=True)
class ViTConfig(ModelConfig):
    """Architecture of a Vision Transformer."""

    FAMILY: ClassVar[str] = "vit"

    name: str
    """timm's model name or vit_custom; only messages use it."""
    patch_size: int
    """Side of a patch, in pixels."""
    embed_dim: int
    """Features of a token."""
    depth: int
    """Number of blocks."""
    num_heads: int
    """Attention heads of a block; divides `embed_dim`."""
    mlp_hidden_dim: int
    """Hidden features of a block's MLP."""
    image_size: int = 224
    """Side of the square input image, in pixels; a multiple of `patch_size`."""
    num_classes: int = 1000
    """Outputs of the classifier."""
    channels: int = 3
    """Channels of an input image."""
    pool: Literal["cls", "avg"] = "cls"
    """Input of the classifier: the class token, or the mean of the patch tokens (then there is no class token)."""
    num_reg_tokens: int = 0
    """Register tokens: learned tokens that are dropped before the classifier (arXiv 2309.16588)."""
    distillation: bool = False
    """Add DeiT's distillation token with its own classifier; logits are the mean of both (arXiv 2012.12877)."""
    representation_size: int | None = None
    """Features of a Linear + tanh before the classifier; None for no such layer."""
    position: Literal["learned", "sincos2d"] = "learned"
    """Position embedding: learned, or fixed sines and cosines on patch tokens only."""
    qk_norm: bool = False
    """Apply LayerNorm to queries and keys in each head."""
    norm_eps: float = 1e-6
    """Epsilon of every LayerNorm (1e-6 in timm, 1e-12 in transformers)."""
    layer_scale: float | None = None
    """Initial value of the learned scale of each residual branch; None for no scale (arXiv 2103.17239)."""
    drop_path: float = 0.0
    """Stochastic depth rate of the last block; it rises linearly from 0 over the blocks."""
    dropout: float = 0.0
    """Dropout rate after positions, attention projection and MLP."""
    init: Literal["jax", "timm", "moco", "perturbed"] = "jax"
    """Scheme of initial values, timm's ``weight_init`` (docs/models.md). "perturbed" is for tests: no gradient starts
    at zero."""

    def __post_init__(self) -> None:
        name = shown(self.name)
        check_ranges(self, _WORDS)
        if self.embed_dim % self.num_heads:
            raise ModelError(
                f"{self.num_heads} heads do not divide embed_dim {self.embed_dim} of {name}: change one of the two"
            )
        if self.position == "sincos2d" and self.embed_dim % 4:
            raise ModelError(f"embed_dim of {name} is {self.embed_dim}: 2-D sincos positions need a multiple of 4")
        if self.distillation and self.pool != "cls":
            raise ModelError(f"the distillation token of {name} needs pool 'cls', not '{self.pool}'")
        if self.num_reg_tokens < 0:
            raise ModelError(f"num_reg_tokens of {name} is {shown(self.num_reg_tokens)}: it must be 0 or more")
        check_tokens(self, self.tokens, "use larger patches, smaller images or fewer register tokens")

    @property
    def patches(self) -> int:
        """Patch tokens of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def prefix_tokens(self) -> int:
        """Class, distillation and register tokens, which stand before the patches in that order."""
        return (self.pool == "cls") + self.distillation + self.num_reg_tokens

    @property
    def tokens(self) -> int:
        """Tokens of an image inside the blocks."""
        return self.prefix_tokens + self.patches

    @property
    def features(self) -> int:
        """Features that the classifier reads."""
        return self.representation_size or self.embed_dim

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def stochastic(self) -> bool:
        """Whether training draws random numbers inside the model."""
        return self.drop_path > 0 or self.dropout > 0

    @classmethod
    def knows(cls, name: str) -> bool:
        found = _NAME.fullmatch(name)
        return name == "vit_custom" or (found is not None and found[1] in SIZES)

    @classmethod
    def named(cls, name: str, options: Mapping[str, Any]) -> Self:
        if name == "vit_custom":
            missing = {"patch_size", "embed_dim", "depth", "num_heads"} - set(options)
            if missing:
                raise ModelError(
                    f"vit_custom needs the model option{'s' * (len(missing) > 1)} {', '.join(sorted(missing))}"
                )
            return cls(name=name, **{"mlp_hidden_dim": 4 * options["embed_dim"], **options})
        found = _NAME.fullmatch(name)
        assert found is not None, f"{name} is no ViT"
        fields = {**SIZES[found[1]], "patch_size": int(found[2]), "image_size": int(found[3]), **options}
        if "embed_dim" in options and "mlp_hidden_dim" not in options:
            fields["mlp_hidden_dim"] = 4 * options["embed_dim"]
        return cls(name=name, **fields)

    @classmethod
    def published(cls) -> tuple[str, ...]:
        return SHIPPED

    @property
    def large(self) -> bool:
        return self.embed_dim > 768 or self.depth > 12

    def describe(self) -> tuple[LayerDescription, ...]:
        blocks = (self._block(index) for index in range(self.depth))
        return self._embed(), *blocks, self._head()

    def build_layer(self, name: str) -> nn.Module:
        layer: nn.Module = from_torch_module("vitpar.models.vit.layers", "build_layer")(self, name)
        return layer

    @property
    def tiny(self) -> Self:
        return replace(self, embed_dim=8 * self.num_heads, mlp_hidden_dim=16 * self.num_heads)

    def initial_rules(self) -> Rules:
        rules: Rules = from_torch_module("vitpar.models.vit.initial", "SCHEMES")[self.init]
        return rules

    @property
    def _shape(self) -> Shape:
        return Shape(self.tokens, self.embed_dim)

    def _embed(self) -> LayerDescription:
        d = self.embed_dim
        learned = {
            "cls_token": self.pool == "cls",
            "dist_token": self.distillation,
            "reg_token": self.num_reg_tokens,
            "pos_embed": self.tokens * (self.position == "learned"),
        }
        return LayerDescription(
            "embed",
            "embed",
            None,
            self._shape,
            (
                linear("patch_embed.proj", "embedding", self.channels * self.patch_size**2, d, self.patches),
                *(parameter(name, "token", 1, int(count), d) for name, count in learned.items() if count),
            ),
        )

    def _block(self, index: int) -> LayerDescription:
        d, h, s = self.embed_dim, self.mlp_hidden_dim, self.tokens
        scaled, normed = self.layer_scale is not None, ("attn.q_norm", "attn.k_norm") * self.qk_norm
        parts = (
            norm("norm1", d, s),
            linear("attn.qkv", "column", d, 3 * d, s),
            *(norm(name, self.head_dim, s * self.num_heads, "heads") for name in normed),
            linear("attn.proj", "row", d, d, s),
            *([parameter("ls1.gamma", "scale", d)] * scaled),
            norm("norm2", d, s),
            linear("mlp.fc1", "column", d, h, s),
            linear("mlp.fc2", "row", h, d, s),
            *([parameter("ls2.gamma", "scale", d)] * scaled),
        )
        return LayerDescription(
            f"blocks.{index}",
            "block",
            self._shape,
            self._shape,
            parts,
            AttentionShape(s, self.num_heads, self.head_dim),
            divisible={"head": self.num_heads, "hidden feature": h},
        )

    def _head(self) -> LayerDescription:
        d, hidden, classes, read = self.embed_dim, self.representation_size, self.num_classes, 1 + self.distillation
        parts = (
            norm("norm", d, self.tokens if self.pool == "avg" else read),
            Part("pooled", "pooled", tokens=read, width=d),
            *([linear("representation", "representation", d, hidden, read)] if hidden else []),
            *(linear(name, "classifier", self.features, classes, 1) for name in ("fc", "fc_dist")[:read]),
        )
        return LayerDescription(
            "head",
            "head",
            self._shape,
            Shape(1, classes),
            parts,
            divisible={"classifier feature": self.features},
        )


def _sizes(embed_dim: int, depth: int, num_heads: int, mlp_hidden_dim: int = 0, **options: Any) -> dict[str, Any]:
    hidden = mlp_hidden_dim or 4 * embed_dim
    return {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, "mlp_hidden_dim": hidden, **options}


_NAME = re.compile("([a-z0-9_]{1,30})_patch([0-9]{1,9})_([0-9]{1,9})")
SIZES: dict[str, dict[str, Any]] = {
    "vit_nano": _sizes(96, 8, 12),  # ours: small enough for a laptop's processes, divisible enough for most plans
    "vit_tiny": _sizes(192, 12, 3),
    "vit_small": _sizes(384, 12, 6),
    "vit_base": _sizes(768, 12, 12),
    "vit_large": _sizes(1024, 24, 16),
    "vit_huge": _sizes(1280, 32, 16),
    "vit_giant": _sizes(1408, 40, 16, 6144),
    "vit_gigantic": _sizes(1664, 48, 16, 8192),
    # Sequential blocks with biases; the paper's run attention and MLP side by side.
    "vit_22b": _sizes(6144, 48, 48, qk_norm=True),
    "deit_tiny": _sizes(192, 12, 3),
    "deit_small": _sizes(384, 12, 6),
    "deit_base": _sizes(768, 12, 12),
    "deit_tiny_distilled": _sizes(192, 12, 3, distillation=True),
    "deit_small_distilled": _sizes(384, 12, 6, distillation=True),
    "deit_base_distilled": _sizes(768, 12, 12, distillation=True),
}
SHIPPED = (
    *(
        f"{family}_patch{patch}_224"
        for family in ("vit_tiny", "vit_small", "vit_base", "vit_large")
        for patch in (16, 32)
    ),
    "vit_base_patch8_224",
    "vit_large_patch14_224",
    *(f"{family}_patch14_224" for family in ("vit_huge", "vit_giant", "vit_gigantic", "vit_22b")),
    *(f"deit_{size}{kind}_patch16_224" for size in ("tiny", "small", "base") for kind in ("", "_distilled")),
)
"""Names that stand for a published model; any other patch and image size of a family is a name too."""
