"""The shape of a Vision Transformer and the names it goes by, without importing torch (planning needs no tensors).

Names and sizes are timm's; the widths of giant, gigantic and 22B are those of "Scaling Vision Transformers"
(arXiv 2106.04560) and "Scaling Vision Transformers to 22 Billion Parameters" (arXiv 2302.05442).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vitpar.errors import ModelError
from vitpar.former_names import present_field
from vitpar.limits import MAX_BLOCKS, MAX_CHANNELS, MAX_CLASSES, MAX_IMAGE_SIZE, MAX_TOKENS, MAX_WIDTH
from vitpar.text import nearest, shown

_LARGEST = {
    "patch_size": MAX_IMAGE_SIZE,
    "embed_dim": MAX_WIDTH,
    "depth": MAX_BLOCKS,
    "num_heads": MAX_WIDTH,
    "mlp_hidden_dim": MAX_WIDTH,
    "image_size": MAX_IMAGE_SIZE,
    "num_classes": MAX_CLASSES,
    "channels": MAX_CHANNELS,
    "representation_size": MAX_WIDTH,
}
_KNOWN = {
    "pool": ("cls", "avg"),
    "position": ("learned", "sincos2d"),
    "init": ("jax", "timm", "moco", "perturbed"),
}
IGNORED = -1
"""Label of a sample that counts for nothing: padding, or an image that could not be read."""


@dataclass(frozen=True)
class ViTConfig:
    """Architecture of a Vision Transformer: all that decides its parameters and its forward function.

    Raises ModelError for values out of range, or that contradict each other.
    """

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
        for field, most in _LARGEST.items():
            if (number := getattr(self, field)) is not None and not 1 <= number <= most:
                raise ModelError(f"{field} of {name} is {shown(number)}: it must be from 1 to {most:,}")
        if self.image_size % self.patch_size:
            near = max(1, round(self.image_size / self.patch_size)) * self.patch_size
            raise ModelError(
                f"patches of {self.patch_size} pixels do not tile images of {self.image_size} for {name}: "
                f"use an image size of {near} or another patch size"
            )
        for field, known in _KNOWN.items():
            if (value := getattr(self, field)) not in known:
                raise ModelError(
                    f"unknown {field} '{shown(value)}' of {name}{nearest(value, known)}: use {' or '.join(known)}"
                )
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
        if self.tokens > MAX_TOKENS:
            raise ModelError(
                f"images of {name} have {shown(self.tokens)} tokens, above {MAX_TOKENS:,}: use larger patches, smaller "
                "images or fewer register tokens"
            )
        if not 0.0 < self.norm_eps <= 1.0:
            raise ModelError(f"norm_eps of {name} is {shown(self.norm_eps)}: it must be above 0 and at most 1")
        for field in ("drop_path", "dropout"):
            if not 0.0 <= (rate := getattr(self, field)) < 1.0:
                raise ModelError(f"{field} of {name} is {shown(rate)}: it must be at least 0 and below 1")

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

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers in order: embed, blocks.0 …, head."""
        return ("embed", *(f"blocks.{i}" for i in range(self.depth)), "head")

    @property
    def layer_flops(self) -> dict[str, int]:
        """Floating-point operations of one image's training step (forward × 3) by layer, matrix products only."""
        s, d = self.tokens, self.embed_dim
        block = 6 * (s * (4 * d * d + 2 * d * self.mlp_hidden_dim) + 2 * s * s * d)
        features = self.representation_size or d
        head = 6 * (features * self.num_classes * (1 + self.distillation) + d * (self.representation_size or 0))
        embed = 6 * self.patches * self.channels * self.patch_size**2 * d
        return {"embed": embed, **{f"blocks.{i}": block for i in range(self.depth)}, "head": head}

    @property
    def flops(self) -> int:
        """Floating-point operations of one image's training step."""
        return sum(self.layer_flops.values())


FIELDS = frozenset(field.name for field in dataclasses.fields(ViTConfig))


def config_from_json(said: Mapping[str, Any]) -> ViTConfig:
    """Return the configuration whose fields are `said`. Raises ModelError for values that JSON has otherwise, too."""
    from pydantic import TypeAdapter, ValidationError

    if unknown := said.keys() - FIELDS:
        name = min(unknown)
        if present := present_field(name):
            raise ModelError(f"field '{name}' is now called '{present}': rename it")
        raise ModelError(f"unknown model field '{shown(name)}'")
    try:
        return TypeAdapter(ViTConfig).validate_json(json.dumps(said), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "value_error":  # a sentence of ours
            raise ModelError(str(first["ctx"]["error"])) from None
        place = ".".join(map(str, first["loc"]))
        raise ModelError(f"{place}{': ' * bool(place)}{shown(first['msg'])}") from None


def _sizes(embed_dim: int, depth: int, num_heads: int, mlp_hidden_dim: int = 0, **options: Any) -> dict[str, Any]:
    hidden = mlp_hidden_dim or 4 * embed_dim
    return {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, "mlp_hidden_dim": hidden, **options}


FAMILIES: dict[str, dict[str, Any]] = {
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


def model_config(name: str, **options: Any) -> ViTConfig:
    """The configuration of a model by timm's name, e.g. ``vit_small_patch16_224``, with `options` replacing its fields.

    Any family takes any patch and image size: ``vit_tiny_patch4_32``. The name ``vit_custom`` takes everything from
    `options`.

    Raises ModelError for an unknown name or option, or options that contradict each other.
    """
    known = FIELDS - {"name"}
    for option in options:
        if present := present_field(option):
            raise ModelError(f"model option '{option}' is now called '{present}': rename it")
        if option not in known:
            raise ModelError(
                f"unknown model option '{shown(option)}'{nearest(option, known)}: options are "
                f"{', '.join(sorted(known))}"
            )
    if name == "vit_custom":
        missing = {"patch_size", "embed_dim", "depth", "num_heads"} - set(options)
        if missing:
            raise ModelError(
                f"vit_custom needs the model option{'s' * (len(missing) > 1)} {', '.join(sorted(missing))}"
            )
        return ViTConfig(name=name, **{"mlp_hidden_dim": 4 * options["embed_dim"], **options})
    family, _, sizes = name.partition("_patch")
    patch, _, image = sizes.partition("_")
    if family not in FAMILIES or not all(re.fullmatch("[0-9]{1,9}", size) for size in (patch, image)):
        raise ModelError(
            f"unknown model '{shown(name)}'{nearest(name, SHIPPED)}: use a name such as vit_small_patch16_224, or "
            "vit_custom"
        )
    fields = {**FAMILIES[family], "patch_size": int(patch), "image_size": int(image), **options}
    if "embed_dim" in options and "mlp_hidden_dim" not in options:
        fields["mlp_hidden_dim"] = 4 * options["embed_dim"]
    return ViTConfig(name=name, **fields)
